"""The gate: whether a guided receiver stays near enough to its dense self, on text that nothing was chosen by.

Limits are for the end of a 95 % interval that is against the pair, not for the mean. Masks made without the sender, as
dense as the guided one list by list, must be worse: else the sender's state is worth nothing here.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engines.models.interval import Interval, student_t
from engines.models.progress import Progress, silent
from engines.reuse.artifact import Measured
from engines.reuse.study.masks import Mask
from engines.reuse.study.passages import recollection
from engines.reuse.study.runs import Runs, distance, in_conversations, recalled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.needle import Needle
    from engines.reuse.study.pair import Pair

CONTROLS = (Mask.RANDOM, Mask.WINDOW)


@dataclass(frozen=True)
class Limits:
    """What a pair must keep to.

    Attributes:
        divergence: mean KL of the next tokens from the dense run, in nats, at most.
        agreement: share of tokens where both would say the same next, at least.
        recall: of facts in the prefix, by how much the share may fall short of the dense run's.
        density: kept blocks as a share of the causal ones, at most; more saves too little.
    """

    divergence: float = 0.01
    agreement: float = 0.95
    recall: float = 0.05
    density: float = 0.7


@dataclass
class Verdicts:
    """Of texts, one figure each by mask; of needles, whether each was recalled."""

    divergence: dict[Mask, list[float]] = field(default_factory=lambda: {mask: [] for mask in Mask})
    agreement: list[float] = field(default_factory=list)
    density: list[float] = field(default_factory=list)
    recalled: dict[Mask, list[bool]] = field(default_factory=lambda: {mask: [] for mask in Mask})

    def recall(self, mask: Mask) -> float:
        """Share of the needles."""
        return statistics.fmean(self.recalled[mask])


def judge(
    pair: Pair,
    texts: Sequence[Sequence[int]],
    needles: Sequence[Needle],
    *,
    tail: int,
    recall_tokens: int,
    seed: int,
    controls: Sequence[Mask] = CONTROLS,
    progress: Progress = silent,
) -> Verdicts:
    """Run every text and conversation densely, guided, and under the controls.

    Args:
        pair: as it is to be used.
        texts: that nothing was chosen by; their last `tail` tokens are predicted.
        needles: facts of conversations of `recall_tokens` tokens, eight in each.
        tail: tokens; what is before them is whole row blocks.
        recall_tokens: whole row blocks.
        seed: of random masks and conversations.
        controls: masks made without the sender.
    """
    found, generator = Verdicts(), torch.Generator().manual_seed(seed)
    masks, groups = (Mask.DENSE, Mask.GUIDED, *controls), in_conversations(needles)
    total = len(texts) + len(groups)
    progress("judging", 0, total)
    for done, text in enumerate(texts, 1):
        runs = Runs(pair, text, len(text) - tail, generator)
        found.density.append(runs.density)
        _continue(pair, text, tail, masks, runs, found)
        progress("judging", done, total)
    for done, group in enumerate(groups, len(texts) + 1):
        talk = recollection(pair.receiver.tokenizer, group, recall_tokens, seed + done)
        runs = Runs(pair, talk.tokens, recall_tokens, generator)
        found.density.append(runs.density)
        for mask, attend in runs.under(masks):
            found.recalled[mask] += recalled(pair.receiver, pair.receiver.hidden(talk.tokens, attend), talk)
        progress("judging", done, total)
    return found


def _continue(pair: Pair, text: Sequence[int], tail: int, masks: Sequence[Mask], runs: Runs, found: Verdicts) -> None:
    exact = torch.empty(0)
    for mask, attend in runs.under(masks):
        logs = pair.receiver.log_probabilities(pair.receiver.hidden(text, attend)[len(text) - tail :])
        exact = logs if mask is Mask.DENSE else exact
        divergence, agreement = distance(exact, logs)
        found.divergence[mask].append(divergence)
        if mask is Mask.GUIDED:
            found.agreement.append(agreement)


def figures(found: Verdicts, limits: Limits) -> tuple[Measured, ...]:
    """Every figure of the gate with its limit, and whether it holds."""
    guided = found.divergence[Mask.GUIDED]
    kl, same, kept = mean_interval(guided), mean_interval(found.agreement), statistics.fmean(found.density)
    lost = found.recall(Mask.DENSE) - found.recall(Mask.GUIDED)
    return (
        _measured("divergence", limits.divergence, statistics.fmean(guided), kl, kl.high <= limits.divergence),
        _measured("agreement", limits.agreement, statistics.fmean(found.agreement), same, same.low >= limits.agreement),
        _measured("recall lost", limits.recall, lost, None, lost <= limits.recall + 1e-9),
        _measured("density", limits.density, kept, None, kept <= limits.density),
        *(_against(found, mask) for mask in CONTROLS),
    )


def _against(found: Verdicts, control: Mask) -> Measured:
    """Divergence over that of a control on the same texts: the geometric mean, which must be less than 1."""
    pairs = zip(found.divergence[Mask.GUIDED], found.divergence[control], strict=True)
    # Of a run that is dense after all nothing is left to compare.
    logs = [math.log(max(one, 1e-12) / max(other, 1e-12)) for one, other in pairs]
    reach = mean_interval(logs)
    interval = Interval(math.exp(reach.low), math.exp(reach.high))
    return _measured(f"over {control.value}", 1.0, math.exp(statistics.fmean(logs)), interval, interval.high < 1.0)


def _measured(name: str, limit: float, value: float, interval: Interval | None, passed: bool) -> Measured:
    low, high = (interval.low, interval.high) if interval else (None, None)
    return Measured(name=name, limit=limit, value=value, low=low, high=high, passed=passed)


def mean_interval(values: Sequence[float]) -> Interval:
    """Student's 95 % interval of the mean.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs two values at the least, got {len(values)}")
    mean = statistics.fmean(values)
    reach = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - reach, mean + reach)
