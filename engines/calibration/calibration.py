"""Calibrate a pair: which layers guide which, how heads are mixed, how much is kept, and whether that will do."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from engines.calibration.alignment import Alignment, align
from engines.calibration.choice import Bounds, best_rule, first_that_recalls, nearest, rank
from engines.calibration.gate import Verdicts, figures
from engines.calibration.groups import combinations, single_changes
from engines.calibration.journal import Journal, digest_of
from engines.calibration.judging import Judge
from engines.calibration.maps import MapFit, fit_maps
from engines.calibration.outcome import Calibrated, Wanted
from engines.calibration.profile import Profile, fit_weights, profile
from engines.calibration.rivals import rivals_of
from engines.calibration.samples import gather
from engines.calibration.texts import Passages, Purpose, Source, cut
from engines.calibration.training import Training, train
from engines.calibration.trial import Candidate, Models, Rule, Trials, Tried
from engines.errors import CalibrationDataError
from engines.models.loading import load
from engines.models.needle import needles
from engines.models.progress import Progress, silent
from engines.reuse.identity import read_identity
from engines.reuse.study.masks import Mask
from engines.reuse.study.network import Network
from engines.reuse.study.runs import NEEDLE_TOKENS, in_conversations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from engines.models.needle import Needle
    from engines.reuse.settings import ModelIdentity

__all__ = ["Calibrated", "Wanted", "calibrate"]

# Results of a journal of another version are not taken over.
_VERSION = 1
_TRAIN = "train weights"
# Where enough is left out to learn from: at .95 the loss is near nothing.
_TRAINED_TOP_P, _LEARNING_RATE = 0.87, 0.1
# Of combinations of groups that leave out more so many are asked whether they recall.
_MOST_RECALLED = 2


@dataclass(frozen=True)
class _Work:
    """What all steps have in common."""

    networks: tuple[Network, Network]
    sender: ModelIdentity
    data: tuple[Passages, ...]
    wanted: Wanted
    journal: Journal
    progress: Progress

    @property
    def guidable(self) -> range:
        """Receiver layers that some candidate guides."""
        return range(min(self.wanted.first_layers), self.networks[1].layers - 1)

    def texts(self, purpose: Purpose) -> list[Sequence[int]]:
        """All that are for it."""
        return [text for one in self.data if one.purpose is purpose for text in one.texts]

    def needles(self, count: int, seed: int) -> Sequence[Needle]:
        """Facts to recall."""
        return needles(self.networks[1].loaded, count=count, tokens=NEEDLE_TOKENS, seed=seed)


def calibrate(
    sender: tuple[str, Path],
    receiver: tuple[str, Path],
    sources: Sequence[Source],
    wanted: Wanted,
    *,
    kept: Path | None = None,
    progress: Progress = silent,
) -> Calibrated:
    """Calibrate a pair; less than half an hour for two models of 100 million parameters on a CPU.

    Args:
        sender, receiver: name and folder of each.
        sources: texts for each purpose.
        wanted: how much of what.
        kept: folder in which results of steps are kept, and from which they are taken over if they still hold.
        progress: told of every step.

    Raises:
        CalibrationDataError: sources are missing or too short, or the models have different tokenizers.
        ModelIdentityError: a folder does not tell which model it has.
        UnusableFolderError: a folder has no model that can be loaded.
    """
    theirs, own = read_identity(*sender), read_identity(*receiver)
    _check(theirs, own, wanted)
    journal = Journal(kept, [_VERSION, theirs.revision, own.revision, own.tokenizer, own.template])
    with journal.step("load"):
        networks = Network(load(sender[1])), Network(load(receiver[1]))
        if not networks[1].tokenizer.chat_template:
            raise CalibrationDataError(f"{receiver[1]}: has no chat template, so no question can be asked")
        data = _cut(sources, networks[1], wanted)
    work = _Work(networks, theirs, data, wanted, journal, progress)
    found, taken, other, maps, models = _fit(work)
    models, losses = _train(work, models)
    tried, chosen = _search(work, models)
    verdicts = _judge(work, models, chosen)
    weights = models.pair(chosen).weights
    seconds = {name: round(seconds, 1) for name, seconds in journal.seconds.items()}
    measured = figures(verdicts, wanted.limits)
    return Calibrated(
        theirs,
        own,
        found,
        taken,
        other,
        maps,
        losses,
        tried,
        chosen,
        weights,
        verdicts,
        measured,
        data,
        seconds,
        wanted,
    )


def _check(sender: ModelIdentity, receiver: ModelIdentity, wanted: Wanted) -> None:
    if sender.tokenizer != receiver.tokenizer:
        raise CalibrationDataError(
            f"{receiver.name} cannot use what {sender.name} leaves: they have different tokenizers"
        )
    if min(wanted.first_layers) >= receiver.layers - 1:
        raise CalibrationDataError(f"{receiver.name} has too few layers to guide one: {receiver.layers}")


def _cut(sources: Sequence[Source], network: Network, wanted: Wanted) -> tuple[Passages, ...]:
    counts = {Purpose.FIT: wanted.fit, Purpose.CHOICE: wanted.choice, Purpose.GATE: wanted.gate}
    missing = [purpose.value for purpose in Purpose if not any(one.purpose is purpose for one in sources)]
    if missing:
        raise CalibrationDataError(f"there is no text for {', '.join(missing)}")
    return tuple(
        cut(
            one,
            network.tokenizer,
            tokens=wanted.tail + (wanted.tokens if one.purpose is Purpose.FIT else wanted.gate_tokens),
            count=counts[one.purpose],
            seed=wanted.seed,
        )
        for one in sources
    )


def _fit(work: _Work) -> tuple[Profile, Alignment, Alignment, Mapping[int, MapFit], Models]:
    """Layers and weights, from the texts to fit by."""
    texts, journal, progress = work.texts(Purpose.FIT), work.journal, work.progress
    samples = gather(*work.networks, texts, journal=journal, progress=progress)
    given = [list(text) for text in texts]
    found = Profile(
        journal.get("compare layers", given, lambda: {"variation": profile(samples, progress=progress).variation})[
            "variation"
        ].astype(np.float64)
    )
    taken, other = align(found.variation, work.guidable)
    guided = {layer: taken.layers[layer] for layer in work.guidable}
    fitted = journal.get(
        "fit masses",
        [given, sorted(guided.items())],
        lambda: {
            str(layer): one
            for layer, one in fit_weights(samples, taken.layers, work.guidable, progress=progress).items()
        },
    )
    maps = fit_maps(work.networks, texts, guided, journal, progress=progress)
    weights = {
        Rule.FITTED: {layer: _matrix(fitted[str(layer)]) for layer in guided},
        Rule.MAPS: {layer: _matrix(one.weights) for layer, one in maps.items()},
    }
    return found, taken, other, maps, Models(*work.networks, work.sender, taken.layers, weights)


def _train(work: _Work, models: Models) -> tuple[Models, tuple[float, ...]]:
    """The models with trained weights besides, and losses of all steps."""
    wanted, texts = work.wanted, work.texts(Purpose.FIT)
    if not wanted.train_steps:
        return models, ()
    plan = Training(
        first_layer=work.guidable.start,
        top_p=_TRAINED_TOP_P,
        tail=wanted.tail,
        answer=wanted.tail,
        steps=wanted.train_steps,
        learning_rate=_LEARNING_RATE,
        seed=wanted.seed,
    )
    start = models.weights[Rule.FITTED]
    told = {layer: one.numpy() for layer, one in start.items()}
    given = [[list(text) for text in texts], list(models.layers), digest_of(told), repr(plan)]
    found = work.journal.get(_TRAIN, given, partial(_trained, work, models, texts, plan, given))
    trained = {layer: _matrix(found[str(layer)]) for layer in start}
    return replace(models, weights={**models.weights, Rule.TRAINED: trained}), tuple(found["losses"].tolist())


def _trained(
    work: _Work, models: Models, texts: Sequence[Sequence[int]], plan: Training, given: object
) -> dict[str, np.ndarray]:
    before_s = work.journal.seconds.get(_TRAIN, 0.0)
    left = work.journal.take_up(_TRAIN, given)
    state = None if left is None else {name: torch.tensor(one) for name, one in left.items()}
    earlier_s, started_s = work.journal.seconds.get(_TRAIN, 0.0) - before_s, time.perf_counter()

    def keep(state: Mapping[str, torch.Tensor]) -> None:
        seconds = earlier_s + time.perf_counter() - started_s
        work.journal.leave(_TRAIN, given, {name: one.numpy() for name, one in state.items()}, seconds)

    start = models.weights[Rule.FITTED]
    found = train(models, start, texts, plan, state=state, on_step=keep, progress=work.progress)
    weights = {str(layer): one.numpy() for layer, one in found.weights.items()}
    return {**weights, "losses": np.array(found.losses)}


def _matrix(weights: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(weights).float()


def _search(work: _Work, models: Models) -> tuple[Mapping[Candidate, Tried], Candidate]:
    """All that was tried, and what is chosen."""
    wanted, layers, bounds = work.wanted, models.receiver.layers, Bounds(work.wanted.limits)
    widest, *others = [first for first in sorted(wanted.first_layers) if first < layers - 1]
    rules = [rule for rule in models.rules if rule in wanted.rules]
    tried = _try(work, models, _candidates([widest], rules, wanted), "trying rules")
    rule = best_rule(tried)
    tried |= _try(work, models, _candidates(others, [rule], wanted), "trying candidates")
    ranked = rank({one: found for one, found in tried.items() if one.rule is rule}, bounds, layers)
    if not ranked:
        return tried, nearest(tried)
    chosen = first_that_recalls(ranked, partial(_recalls, work, models), partial(work.progress, "recalling"))
    guided = list(models.pair(chosen).settings.guided)
    singles = single_changes(chosen, guided, wanted.top_ps)
    found = _try(work, models, [*singles.values()], "trying groups of layers")
    singled = {change: found[one] for change, one in singles.items()}
    combined = combinations(chosen, tried[chosen], singled, guided, bounds)
    found |= _try(work, models, [one for one in combined if one not in found], "trying combinations")
    tried |= found
    chosen = _improved(work, models, chosen, tried, found)
    if wanted.map_densities:
        by_maps = _try(work, models, [*_by_maps(chosen, wanted)], "trying maps")
        tried |= by_maps
        chosen = _improved(work, models, chosen, tried, by_maps)
    return tried, chosen


def _improved(
    work: _Work,
    models: Models,
    chosen: Candidate,
    tried: Mapping[Candidate, Tried],
    others: Mapping[Candidate, Tried],
) -> Candidate:
    """Of others that leave out more than the chosen one and recall, what leaves out most; else the chosen one."""
    ranked = rank(others, Bounds(work.wanted.limits), models.receiver.layers)
    better = [one for one in ranked if _saves_more(others[one], tried[chosen])]
    return next((one for one in better[:_MOST_RECALLED] if _recalls(work, models, one)), chosen)


def _by_maps(chosen: Candidate, wanted: Wanted) -> Iterator[Candidate]:
    """The chosen candidate with layers by maps, as it mixes heads and as whole maps would have them mixed."""
    for rule in dict.fromkeys((chosen.rule, Rule.MAPS)):
        for density in wanted.map_densities:
            yield replace(chosen, rule=rule, map_density=density)


def _candidates(first_layers: Sequence[int], rules: Sequence[Rule], wanted: Wanted) -> list[Candidate]:
    return [Candidate(first, rule, top_p) for first in first_layers for rule in rules for top_p in wanted.top_ps]


def _saves_more(own: Tried, other: Tried) -> bool:
    return statistics.fmean(own.density) < statistics.fmean(other.density)


def _try(work: _Work, models: Models, candidates: Sequence[Candidate], stage: str) -> dict[Candidate, Tried]:
    texts = work.texts(Purpose.CHOICE) if candidates else []
    trials = Trials(models, candidates, work.wanted.tail)
    told = [_told(models, one) for one in candidates]
    for number in work_on(len(texts), stage, work.progress):
        find = partial(_tried, trials, texts[number])
        given = [list(texts[number]), work.wanted.tail, told]
        trials.note(work.journal.get("try candidates", given, find)["figures"].tolist())
    return trials.tried


def _tried(trials: Trials, text: Sequence[int]) -> dict[str, np.ndarray]:
    return {"figures": np.asarray(trials.measure(text))}


def _told(models: Models, candidate: Candidate) -> list[object]:
    """All that what a candidate does follows from, but for texts."""
    settings = models.pair(candidate).settings
    weights = digest_of({layer: one.numpy() for layer, one in models.pair(candidate).weights.items()})
    told: list[object] = [[(layer, of, settings.top_p_of(layer)) for layer, of in settings.guided.items()], weights]
    return [*told, settings.map_top_p, settings.most_map_density] if settings.uses_maps else told


def _recalls(work: _Work, models: Models, candidate: Candidate) -> bool:
    """Whether no more is lost than the gate allows, or a single fact: of few facts one is more than that."""
    wanted = work.wanted
    seed = wanted.seed + 1
    judge = Judge(models.pair(candidate), (), wanted.tail, seed, controls=())
    asked = in_conversations(work.needles(wanted.choice_needles, seed))
    given = [_told(models, candidate), seed, wanted.choice_needles]
    found, texts = Verdicts(), work.texts(Purpose.CHOICE)
    for number, group in enumerate(asked):
        prose = texts[number % len(texts)][: wanted.gate_tokens]
        find = partial(judge.remember, group, prose, number)
        found.add_conversation(work.journal.get("recall", [number, list(prose), given], find))
    lost = sum(found.recalled[Mask.DENSE]) - sum(found.recalled[Mask.GUIDED])
    return lost <= max(1, int(wanted.limits.recall * wanted.choice_needles))


def _judge(work: _Work, models: Models, chosen: Candidate) -> Verdicts:
    wanted, found = work.wanted, Verdicts()
    rivals = rivals_of(models, chosen)
    judge = Judge(models.pair(chosen), rivals, wanted.tail, wanted.seed)
    given = [
        *(_told(models, chosen), wanted.seed, wanted.tail, wanted.gate_tokens),
        [(one.name, digest_of({layer: matrix.numpy() for layer, matrix in one.weights.items()})) for one in rivals],
    ]
    texts = [(one.name, text) for one in work.data if one.purpose is Purpose.GATE for text in one.texts]
    groups = in_conversations(work.needles(wanted.needles, wanted.seed))
    questions = in_conversations(work.needles(wanted.answers, wanted.seed + 2))
    for number in work_on(len(texts) + len(groups) + len(questions), "judging", work.progress):
        place = number - len(texts)
        name, text = texts[place % len(texts)]
        prose = text[: wanted.gate_tokens]
        if place < 0:
            find = partial(judge.read, text, number)
            found.add_text(name, work.journal.get("judge texts", [number, list(text), given], find))
        elif place < len(groups):
            find = partial(judge.remember, groups[place], prose, number)
            told = [number, list(prose), wanted.needles, place, given]
            found.add_conversation(work.journal.get("judge recall", told, find))
        else:
            find = partial(judge.ask, questions[place - len(groups)], prose)
            told = [list(prose), wanted.answers, place, given]
            found.add_answers(work.journal.get("judge answers", told, find))
    return found


def work_on(count: int, stage: str, progress: Progress) -> Iterator[int]:
    """Numbers of things to do, of which progress is told."""
    progress(stage, 0, count)
    for number in range(count):
        yield number
        progress(stage, number + 1, count)
