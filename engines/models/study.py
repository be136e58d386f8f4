"""Which layers of a model can be dropped without training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from engines.models import texts
from engines.models.influence import block_influence
from engines.models.judge import Judgement, JudgeSize, judge
from engines.models.perplexity import WINDOW_TOKENS, encode, perplexity, without_layers
from engines.models.progress import Progress, silent
from engines.models.questions import MAX_NEW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.loading import LoadedModel


@dataclass(frozen=True)
class StudySize:
    """How much is measured.

    `by_influence` and `by_search`: the most layers dropped in either way; `singles`: how many of the best single layers
    are judged; `shortlist`: how many of them, best first, larger sets are made from. `questions`: ten, as when the
    table in deploy/models/README.md was measured.
    """

    calibration_tokens: int = 2048
    search_tokens: int = 1024
    heldout_tokens: int = 2048
    dialogues: int = 8
    questions: int = 10
    answer_tokens: int = MAX_NEW_TOKENS
    by_influence: int = 5
    by_search: int = 4
    singles: int = 5
    shortlist: int = 8


@dataclass(frozen=True)
class Candidate:
    """A set of dropped layers and what it costs."""

    how: str
    dropped: tuple[int, ...]
    judgement: Judgement


@dataclass(frozen=True)
class Study:
    """Influence of every layer, perplexity on the search sample with each single layer dropped, and the candidates."""

    influence: tuple[float, ...]
    single: tuple[float, ...]
    candidates: tuple[Candidate, ...]


def study(loaded: LoadedModel, size: StudySize, *, progress: Progress = silent) -> Study:
    """Measure influence, search on calibration text, and judge the candidates on held-out text (minutes)."""
    calibration = encode(loaded, texts.prose(texts.Part.CALIBRATION), size.calibration_tokens)
    influence = block_influence(loaded, calibration, progress=progress)
    search = _Search(loaded, calibration[: size.search_tokens], size, progress)
    single = search.singles()
    plans: dict[tuple[int, ...], str] = {(): "whole model"}
    ranked = sorted(range(len(influence)), key=lambda layer: influence[layer])
    for count in range(1, size.by_influence + 1):
        plans.setdefault(tuple(sorted(ranked[:count])), f"{count} by influence")
    shortlist = sorted(range(len(single)), key=lambda layer: single[layer])[: size.shortlist]
    # On the small search sample the best singles are closer to each other than it can tell.
    for rank, layer in enumerate(shortlist[: size.singles], 1):
        plans.setdefault((layer,), f"1 by search, rank {rank}")
    for dropped in search.larger(shortlist):
        plans.setdefault(dropped, f"{len(dropped)} by search")
    candidates = []
    for done, (dropped, how) in enumerate(plans.items(), 1):
        candidates.append(_judge(loaded, dropped, how, size))
        progress("judging candidates", done, len(plans))
    return Study(influence, single, tuple(candidates))


def _judge(loaded: LoadedModel, dropped: Sequence[int], how: str, size: StudySize) -> Candidate:
    with without_layers(loaded, dropped) as rest:
        judgement = judge(
            rest,
            how,
            JudgeSize(
                prose_tokens=size.heldout_tokens,
                dialogues=size.dialogues,
                # Not in the report.
                conversations=0,
                needles=0,
                questions=size.questions,
                answer_tokens=size.answer_tokens,
            ),
        )
    return Candidate(how, tuple(sorted(dropped)), judgement)


class _Search:
    """Search by perplexity on a small sample: every single layer, pairs of the best of them, then greedily on."""

    def __init__(self, loaded: LoadedModel, ids: Sequence[int], size: StudySize, progress: Progress) -> None:
        self._loaded = loaded
        self._ids = ids
        self._size = size
        self._progress = progress

    def singles(self) -> tuple[float, ...]:
        """Perplexity without layer i, for every i."""
        count = len(self._loaded.layers)
        return tuple(self._all([(layer,) for layer in range(count)], "dropping single layers").values())

    def larger(self, shortlist: Sequence[int]) -> list[tuple[int, ...]]:
        """The best sets of 2, 3, … `by_search` layers of `shortlist`: every pair is tried, then one layer is added."""
        found: list[tuple[int, ...]] = []
        for number in range(2, self._size.by_search + 1):
            if number == 2:
                options = [tuple(sorted(pair)) for pair in combinations(shortlist, 2)]
            else:
                options = [tuple(sorted({*found[-1], layer})) for layer in shortlist if layer not in found[-1]]
            scores = self._all(options, f"dropping {number} layers")
            found.append(min(scores, key=lambda layers: scores[layers]))
        return found

    def _all(self, options: Sequence[tuple[int, ...]], stage: str) -> dict[tuple[int, ...], float]:
        scores = {}
        for done, dropped in enumerate(options, 1):
            with without_layers(self._loaded, dropped) as rest:
                # No overlap between windows: half of the time, and the same order of candidates.
                scores[dropped] = perplexity(rest, self._ids, stride=WINDOW_TOKENS).value
            self._progress(stage, done, len(options))
        return scores
