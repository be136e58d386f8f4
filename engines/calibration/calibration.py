"""Calibrate a pair: which layers guide which, how heads are mixed, how much is kept, and whether that will do."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engines.calibration.alignment import Alignment, align
from engines.calibration.gate import Limits, Verdicts, figures, judge
from engines.calibration.profile import Profile, fit_weights, profile
from engines.calibration.samples import gather
from engines.calibration.texts import Passages, Purpose, Source, cut
from engines.calibration.trial import Candidate, Models, Rule, Trials, Tried
from engines.errors import CalibrationDataError
from engines.models.loading import load
from engines.models.needle import needles
from engines.models.progress import Progress, silent
from engines.reuse.artifact import DataSource, Manifest, Measured
from engines.reuse.identity import read_identity
from engines.reuse.study.masks import Mask
from engines.reuse.study.network import Network
from engines.reuse.study.runs import NEEDLE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from engines.models.needle import Needle
    from engines.reuse.settings import ModelIdentity

# Of what the gate allows, the share that a choice may use: it is made on few texts, and the gate judges intervals.
_DIVERGENCE_MARGIN, _AGREEMENT_MARGIN = 0.5, 0.8


@dataclass(frozen=True)
class Wanted:
    """What to calibrate with.

    Attributes:
        tokens: of a text's prefix, whole row blocks, and of a conversation about facts.
        tail: tokens after it that are predicted.
        fit, choice, gate: how many texts of each source for that purpose.
        choice_needles, needles: facts to recall, to choose by and to judge by.
        first_layers, rules, top_ps: what is tried.
        limits: of the gate.
        min_tokens: fewer that could be guided are not worth it.
        seed: of texts, facts and random masks.
    """

    tokens: int = 1024
    tail: int = 128
    fit: int = 6
    choice: int = 3
    gate: int = 4
    choice_needles: int = 24
    needles: int = 40
    first_layers: tuple[int, ...] = (1, 2, 3)
    rules: tuple[Rule, ...] = tuple(Rule)
    top_ps: tuple[float, ...] = (0.85, 0.9, 0.95, 0.97)
    limits: Limits = field(default_factory=Limits)
    min_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Calibrated:
    """Everything that was found.

    Attributes:
        sender, receiver: models.
        profile: of all layers.
        alignment, other: the one that was taken, and what suffixes or order would have given.
        tried: every candidate on the texts to choose by.
        chosen: the one that leaves out most within the limits; if none is, the one that is nearest to the dense run.
        weights: [H_S, H_R] of each guided receiver layer, as the chosen rule mixes.
        verdicts, gate: of the chosen one on the texts to judge by.
        data: what was read.
        seconds: of each step.
        wanted: what was asked for.
    """

    sender: ModelIdentity
    receiver: ModelIdentity
    profile: Profile
    alignment: Alignment
    other: Alignment
    tried: Mapping[Candidate, Tried]
    chosen: Candidate
    weights: Mapping[int, torch.Tensor]
    verdicts: Verdicts
    gate: tuple[Measured, ...]
    data: tuple[Passages, ...]
    seconds: Mapping[str, float]
    wanted: Wanted

    def manifest(self, made_by: Mapping[str, str]) -> Manifest:
        """For the artifact."""
        return Manifest(
            sender=self.sender,
            receiver=self.receiver,
            layers=self.alignment.layers,
            first_layer=self.chosen.first_layer,
            top_p=self.chosen.top_p,
            min_tokens=self.wanted.min_tokens,
            max_density=self.wanted.limits.density,
            gate=self.gate,
            data=tuple(
                DataSource(purpose=one.purpose.value, name=one.name, digest=one.digest, tokens=sum(map(len, one.texts)))
                for one in self.data
            ),
            seconds=dict(self.seconds),
            made_by=dict(made_by),
        )


class _Steps:
    """Seconds of every step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started_s, 1)


def calibrate(
    sender: tuple[str, Path],
    receiver: tuple[str, Path],
    sources: Sequence[Source],
    wanted: Wanted,
    *,
    progress: Progress = silent,
) -> Calibrated:
    """Calibrate a pair; a quarter of an hour for two models of 100 million parameters on a CPU.

    Args:
        sender, receiver: name and folder of each.
        sources: texts for each purpose.
        wanted: how much of what.
        progress: told of every step.

    Raises:
        CalibrationDataError: sources are missing or too short, or the models have different tokenizers.
        ModelIdentityError: a folder does not tell which model it has.
        UnusableFolderError: a folder has no model that can be loaded.
    """
    steps, theirs, own = _Steps(), read_identity(*sender), read_identity(*receiver)
    _check(theirs, own, wanted)
    with steps.step("load"):
        networks = Network(load(sender[1])), Network(load(receiver[1]))
        data = _cut(sources, networks[1], wanted)
    found, taken, other, models = _fit(networks, theirs, data, wanted, steps, progress)
    with steps.step("try candidates"):
        trials = _try(models, _texts(data, Purpose.CHOICE), wanted, progress)
    with steps.step("choose"):
        chosen = _choose(models, trials, wanted, progress)
    with steps.step("judge"):
        asked = needles(networks[1].loaded, count=wanted.needles, tokens=NEEDLE_TOKENS, seed=wanted.seed)
        pair = models.pair(chosen)
        verdicts = judge(
            pair,
            _texts(data, Purpose.GATE),
            asked,
            tail=wanted.tail,
            recall_tokens=wanted.tokens,
            seed=wanted.seed,
            progress=progress,
        )
    return Calibrated(
        theirs,
        own,
        found,
        taken,
        other,
        trials.tried,
        chosen,
        pair.weights,
        verdicts,
        figures(verdicts, wanted.limits),
        data,
        steps.seconds,
        wanted,
    )


def _check(sender: ModelIdentity, receiver: ModelIdentity, wanted: Wanted) -> None:
    if sender.tokenizer != receiver.tokenizer:
        raise CalibrationDataError(
            f"{receiver.name} cannot use what {sender.name} leaves: they have different tokenizers"
        )
    if min(wanted.first_layers) >= receiver.layers - 1:
        raise CalibrationDataError(f"{receiver.name} has too few layers to guide one: {receiver.layers}")


def _fit(
    networks: tuple[Network, Network],
    sender: ModelIdentity,
    data: Sequence[Passages],
    wanted: Wanted,
    steps: _Steps,
    progress: Progress,
) -> tuple[Profile, Alignment, Alignment, Models]:
    """Layers and weights, from the texts to fit by."""
    guided = range(min(wanted.first_layers), networks[1].layers - 1)
    with steps.step("observe"):
        samples = gather(*networks, _texts(data, Purpose.FIT), progress=progress)
    with steps.step("compare layers"):
        found = profile(samples, progress=progress)
        taken, other = align(found.variation, guided)
    with steps.step("fit weights"):
        fitted = fit_weights(samples, taken.layers, guided, progress=progress)
    weights = {layer: torch.from_numpy(matrix).float() for layer, matrix in fitted.items()}
    return found, taken, other, Models(*networks, sender, taken.layers, weights)


def _cut(sources: Sequence[Source], network: Network, wanted: Wanted) -> tuple[Passages, ...]:
    counts = {Purpose.FIT: wanted.fit, Purpose.CHOICE: wanted.choice, Purpose.GATE: wanted.gate}
    missing = [purpose.value for purpose in Purpose if not any(one.purpose is purpose for one in sources)]
    if missing:
        raise CalibrationDataError(f"there is no text for {', '.join(missing)}")
    tokens = wanted.tokens + wanted.tail
    return tuple(
        cut(one, network.tokenizer, tokens=tokens, count=counts[one.purpose], seed=wanted.seed) for one in sources
    )


def _texts(data: Sequence[Passages], purpose: Purpose) -> list[Sequence[int]]:
    return [text for one in data if one.purpose is purpose for text in one.texts]


def _try(models: Models, texts: Sequence[Sequence[int]], wanted: Wanted, progress: Progress) -> Trials:
    last = models.receiver.layers - 1
    candidates = [
        Candidate(first, rule, top_p)
        for first in wanted.first_layers
        if first < last
        for rule in wanted.rules
        for top_p in wanted.top_ps
    ]
    trials = Trials(models, candidates, wanted.tail)
    for done, text in enumerate(texts):
        progress("trying candidates", done, len(texts))
        trials.read(text)
    progress("trying candidates", len(texts), len(texts))
    return trials


def _choose(models: Models, trials: Trials, wanted: Wanted, progress: Progress) -> Candidate:
    """Of the candidates within the limits the one that leaves out most and recalls.

    What leaves out less recalls no less, but for chance, so a bisection finds it.
    """
    layers = models.receiver.layers
    within = [one for one, tried in trials.tried.items() if _is_within(tried, wanted.limits)]
    if not within:
        return min(trials.tried, key=lambda one: sum(trials.tried[one].divergence))
    ranked = sorted(within, key=lambda one: trials.tried[one].saved(one, layers), reverse=True)
    asked = needles(models.receiver.loaded, count=wanted.choice_needles, tokens=NEEDLE_TOKENS, seed=wanted.seed + 1)
    low, high, steps = 0, len(ranked) - 1, (len(ranked) - 1).bit_length()
    for step in range(steps):
        progress("recalling", step, steps)
        if low == high:
            break
        middle = (low + high) // 2
        low, high = (low, middle) if _recalls(models, ranked[middle], asked, wanted) else (middle + 1, high)
    progress("recalling", steps, steps)
    return ranked[low]


def _is_within(tried: Tried, limits: Limits) -> bool:
    apart = 1 - statistics.fmean(tried.agreement)
    return (
        statistics.fmean(tried.divergence) <= _DIVERGENCE_MARGIN * limits.divergence
        and apart <= _AGREEMENT_MARGIN * (1 - limits.agreement)
        and statistics.fmean(tried.density) <= limits.density
    )


def _recalls(models: Models, candidate: Candidate, asked: Sequence[Needle], wanted: Wanted) -> bool:
    """Whether no more is lost than the gate allows, or a single fact: of few facts one is more than that."""
    found = judge(
        models.pair(candidate),
        [],
        asked,
        tail=wanted.tail,
        recall_tokens=wanted.tokens,
        seed=wanted.seed + 1,
        controls=(),
    )
    lost = sum(found.recalled[Mask.DENSE]) - sum(found.recalled[Mask.GUIDED])
    return lost <= max(1, int(wanted.limits.recall * len(asked)))
