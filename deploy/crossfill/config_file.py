"""Configuration files of both kinds: which kind one is, whether all that it names can be used, and what it comes to."""

import difflib
from pathlib import Path
from typing import Any, Literal

from crossfill.config import StackConfig, StackModel
from crossfill.errors import StartError
from crossfill.reuse_plan import reuse_settings
from engines.errors import PairArtifactError
from engines.models.catalogue import CATALOGUE
from engines.models.prepare import DEFAULT_ROOT
from engines.reuse.artifact import read_manifest, read_weights
from router.config import ModelConfig, RouterConfig, RouterSections, load_yaml
from router.config.yaml_file import read_mapping
from router.decision.decider import build_scorer
from router.errors import JsonObject
from router.tenants.keyring import open_keyrings

Kind = Literal["stack", "router"]
KINDS: dict[Kind, type[StackConfig] | type[RouterConfig]] = {"stack": StackConfig, "router": RouterConfig}

_MODEL_KEYS = tuple({**StackModel.model_fields, **ModelConfig.model_fields})


def load_any(path: Path) -> StackConfig | RouterConfig:
    """Read a stack's file or a router's. Raises ConfigError, in the words of the kind that the file looks like."""
    return load_yaml(path, KINDS[_kind_of(read_mapping(path))])


def kind_of(config: RouterSections) -> Kind:
    """What the file of this configuration is called."""
    return "stack" if isinstance(config, StackConfig) else "router"


def check_files(config: RouterSections) -> None:
    """Build what needs the files that `config` names. Raises ConfigError if one of them cannot be used."""
    build_scorer(config.routing)
    open_keyrings(config.auth)


def check_pairs(config: RouterSections, models_root: Path = DEFAULT_ROOT) -> None:
    """Read the artifacts of a stack's pairs, and compare the models, as far as they are there already.

    Raises StartError if an artifact cannot be used or a pair cannot work.

    Args:
        config: of a stack; of a router, which has none.
        models_root: where models of the catalogue are made.
    """
    if not isinstance(config, StackConfig):
        return
    for pair in config.reuse.pairs:
        if pair.artifact is not None:
            _check_artifact(pair.artifact)
    sources = {model.name: model.source for model in config.models if model.source is not None}
    folders = {source: models_root / source if source in CATALOGUE else Path(source) for source in sources.values()}
    there = {name for name, source in sources.items() if folders[source].is_dir()}
    pairs = tuple(pair for pair in config.reuse.pairs if {pair.sender, pair.receiver} <= there)
    reuse_settings(config.model_copy(update={"reuse": config.reuse.model_copy(update={"pairs": pairs})}), folders)


def _check_artifact(folder: Path) -> None:
    try:
        read_weights(folder, read_manifest(folder))
    except PairArtifactError as error:
        raise StartError(f"reuse.pairs: {error}") from error


def effective(config: StackConfig | RouterConfig) -> JsonObject:
    """The whole configuration, every default filled in; as a file it would mean the same.

    But for a password in the store's URL, which is not shown.
    """
    dumped: JsonObject = config.model_dump(mode="json")
    dumped["store"] = {**config.store.model_dump(mode="json"), "url": config.store.shown_url}
    if isinstance(config, StackConfig):
        dumped["models"] = [_effective_model(config, model) for model in config.models]
    return dumped


def schema_of(kind: Kind) -> JsonObject:
    """The JSON Schema (draft 2020-12) of a file of this kind."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **KINDS[kind].model_json_schema()}


def _effective_model(config: StackConfig, model: StackModel) -> JsonObject:
    if model.source is None:
        return model.model_dump(mode="json", exclude={"source", "replicas", "worker"})
    dumped: JsonObject = model.model_dump(mode="json", exclude={"urls"})
    dumped["worker"] = config.worker_settings(model).model_dump(mode="json")
    return dumped


def _kind_of(data: dict[Any, Any]) -> Kind:
    """A router's file gives its models `workers`; a misspelt `worker` or `workers` counts as the nearer of the two."""
    models = data.get("models")
    keys = (
        [str(key) for model in models if isinstance(model, dict) for key in model] if isinstance(models, list) else []
    )
    near = [close[0] for key in keys if (close := difflib.get_close_matches(key, _MODEL_KEYS, n=1))]
    served, started = near.count("workers"), near.count("source") + near.count("urls")
    return "router" if served and served >= started else "stack"
