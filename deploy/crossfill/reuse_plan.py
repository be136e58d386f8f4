"""What each worker is told about reuse, from the pairs of the stack's file and the models in their folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from crossfill.errors import StartError
from engines.errors import ModelIdentityError, PairArtifactError
from engines.reuse.artifact import read_manifest
from engines.reuse.identity import read_identity
from engines.reuse.refusal import Refusal
from engines.reuse.settings import PairSettings, PairTuning, ReuseSettings, Weights, align_suffix

if TYPE_CHECKING:
    from collections.abc import Mapping

    from crossfill.config import PairConfig, StackConfig
    from engines.reuse.settings import ModelIdentity


def reuse_settings(config: StackConfig, folders: Mapping[str, Path | str]) -> dict[str, ReuseSettings]:
    """Settings by model name; a model of no pair has none.

    Args:
        config: the stack.
        folders: where each `source` lies.

    Raises:
        StartError: a pair cannot work: a model is not in a local folder, tokenizers differ, layers do not fit.
    """
    sources = {model.name: model.source for model in config.models if model.source is not None}
    names = {name for pair in config.reuse.pairs for name in (pair.sender, pair.receiver)}
    identities = {name: _identity(name, folders[sources[name]]) for name in sorted(names)}
    pairs: dict[str, list[PairSettings]] = {name: [] for name in names}
    publish: dict[str, set[int]] = {name: set() for name in names}
    maps: dict[str, dict[int, float]] = {name: {} for name in names}
    for pair in config.reuse.pairs:
        settled = _pair(pair, identities)
        pairs[pair.receiver].append(settled)
        if settled.refused is None:
            publish[pair.sender] |= set(settled.guided.values())
        if settled.refused is None and settled.uses_maps:
            kept = maps[pair.sender]
            # Of several receivers the one that wants most of a layer is served, and so are all others.
            kept |= {layer: max(settled.map_top_p, kept.get(layer, 0.0)) for layer in settled.guided.values()}
    return {
        name: _settings(config, identity, sorted(publish[name]), maps[name], pairs[name])
        for name, identity in identities.items()
    }


def _identity(name: str, folder: Path | str) -> ModelIdentity:
    path = Path(folder)
    if not path.is_dir():
        raise StartError(f"reuse.pairs: {name} must lie in a local folder, {folder} is none; download it first")
    try:
        return read_identity(name, path)
    except ModelIdentityError as error:
        raise StartError(f"reuse.pairs: {error}") from error


def _pair(pair: PairConfig, identities: Mapping[str, ModelIdentity]) -> PairSettings:
    sender, receiver = identities[pair.sender], identities[pair.receiver]
    what = f"reuse.pairs: {pair.sender} and {pair.receiver}"
    if sender.tokenizer != receiver.tokenizer:
        raise StartError(f"{what} have different tokenizers, so neither knows the other's tokens")
    if pair.artifact is not None:
        return calibrated(pair.artifact, sender, receiver)
    layers = align_suffix(receiver.layers, sender.layers) if pair.layers == "suffix" else pair.layers
    if len(layers) != receiver.layers:
        raise StartError(
            f"{what}: layers names {len(layers)}, one for each that {pair.receiver} has: {receiver.layers}"
        )
    tuning = {name: getattr(pair, name) for name in PairTuning.model_fields}
    try:
        return PairSettings(**tuning, sender=sender, layers=layers)
    except ValidationError as error:
        raise StartError(f"{what}: {_told(error)}") from error


def calibrated(folder: Path, sender: ModelIdentity, receiver: ModelIdentity) -> PairSettings:
    """A pair as its calibration wants it; refused, as workers will tell, if the gate did or the models are others.

    Raises:
        StartError: the artifact cannot be read, or is of models of other shapes.
    """
    try:
        manifest = read_manifest(folder)
    except PairArtifactError as error:
        raise StartError(f"reuse.pairs: {error}") from error
    refused = None
    if not manifest.is_of(sender, receiver):
        refused = Refusal.ARTIFACT_MISMATCH
    elif not manifest.passed:
        refused = Refusal.GATE_FAILED
    try:
        return PairSettings(
            sender=sender,
            layers=manifest.layers,
            first_layer=manifest.first_layer,
            weights=Weights.FITTED,
            top_p=manifest.top_p,
            layer_top_p=manifest.layer_top_p,
            layer_density=manifest.layer_density,
            min_tokens=manifest.min_tokens,
            max_density=manifest.max_density,
            mode=manifest.mode,
            map_top_p=manifest.map_top_p,
            map_density=manifest.map_density,
            artifact=str(folder),
            refused=refused,
        )
    except ValidationError as error:
        raise StartError(f"reuse.pairs: {folder} is of other models: {_told(error)}") from error


def _settings(
    config: StackConfig,
    model: ModelIdentity,
    publish: list[int],
    publish_maps: dict[int, float],
    pairs: list[PairSettings],
) -> ReuseSettings:
    try:
        return ReuseSettings(
            model=model,
            publish=tuple(publish),
            publish_maps=publish_maps,
            pairs=tuple(pairs),
            store=config.store,
            wait_s=config.reuse.wait_s,
            wait_share=config.reuse.wait_share,
            shadow=config.reuse.shadow,
            maps=config.reuse.maps,
        )
    except ValidationError as error:
        raise StartError(f"reuse.pairs: {_told(error)}") from error


def _told(error: ValidationError) -> str:
    return "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors(include_url=False))
