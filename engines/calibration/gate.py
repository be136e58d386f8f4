"""The gate: whether a guided receiver stays near enough to its dense self, on text that nothing was chosen by.

Limits are for the end of a 95 % interval that is against the pair, not for the mean. Ways to guide it that are as dense
and know less must be worse: masks made without the sender, and all of the sender's heads alike. Else what was found is
worth nothing here.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engines.calibration.judging import CONTROLS, after
from engines.calibration.switches import SWITCHES
from engines.calibration.trial import Rule
from engines.models.interval import Interval, mean_interval
from engines.reuse.artifact import Measured
from engines.reuse.study.masks import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engines.calibration.journal import Found


@dataclass(frozen=True)
class Limits:
    """What a pair must keep to.

    Attributes:
        divergence: mean KL of the next tokens from the dense run, in nats, at most.
        agreement: share of tokens where both would say the same next, at least.
        recall: of facts in the prefix, by how much the share may fall short of the dense run's.
        answers: by how much ROUGE-L and F1 of greedy answers may fall short of the dense run's.
        density: kept blocks as a share of the causal ones, at most; more saves too little.
    """

    divergence: float = 0.01
    agreement: float = 0.95
    recall: float = 0.05
    answers: float = 0.05
    density: float = 0.7


@dataclass
class Verdicts:
    """What was measured, by the names of ways to guide (`Mask`, `Rule` and others) and of answers after switches.

    Attributes:
        sources: of each text.
        divergence, agreement: one figure a text.
        densities: of the guided mask of each guided layer, of all texts and conversations.
        recalled: of each fact, whether it was.
        rouge, f1: of each greedy answer, dense and guided.
    """

    sources: list[str] = field(default_factory=list)
    divergence: dict[str, list[float]] = field(default_factory=dict)
    agreement: dict[str, list[float]] = field(default_factory=dict)
    densities: list[list[float]] = field(default_factory=list)
    recalled: dict[str, list[bool]] = field(default_factory=dict)
    rouge: dict[str, list[float]] = field(default_factory=dict)
    f1: dict[str, list[float]] = field(default_factory=dict)

    def add_text(self, source: str, found: Found) -> None:
        """Of `Judge.read`."""
        self.sources.append(source)
        self.densities.append(found["density"].tolist())
        for name, pair in found.items():
            if name != "density":
                divergence, agreement = pair.tolist()
                self.divergence.setdefault(name, []).append(divergence)
                self.agreement.setdefault(name, []).append(agreement)

    def add_conversation(self, found: Found) -> None:
        """Of `Judge.remember`."""
        self.densities.append(found["density"].tolist())
        for name, recalled in found.items():
            if name != "density":
                self.recalled.setdefault(name, []).extend(recalled.tolist())

    def add_answers(self, found: Found) -> None:
        """Of `Judge.ask`."""
        for name, scores in found.items():
            self.rouge.setdefault(name, []).extend(scores[:, 0].tolist())
            self.f1.setdefault(name, []).extend(scores[:, 1].tolist())

    @property
    def layer_density(self) -> tuple[float, ...]:
        """Mean of each guided layer."""
        return tuple(map(statistics.fmean, zip(*self.densities, strict=True)))

    @property
    def density(self) -> float:
        """Mean of all guided layers."""
        return statistics.fmean(self.layer_density)

    def recall(self, name: str) -> float:
        """Share of the facts."""
        return statistics.fmean(self.recalled[name])

    @property
    def compared(self) -> tuple[str, ...]:
        """That were compared at equal density, the guided one first."""
        return tuple(name for name in self.divergence if name in self.recalled)


def figures(found: Verdicts, limits: Limits) -> tuple[Measured, ...]:
    """Every figure of the gate with its limit, and whether it holds."""
    rivals = [*CONTROLS, *(rule for rule in (Rule.UNIFORM,) if rule in found.divergence)]
    return (
        *_near(found, limits),
        _fallen("recall lost", found.recalled, limits.recall),
        _fallen("ROUGE-L lost", found.rouge, limits.answers),
        _fallen("F1 lost", found.f1, limits.answers),
        _measured("density", limits.density, found.density, None, found.density <= limits.density),
        *(_against(found, rival) for rival in rivals),
        *(_recalls_no_less(found, rival) for rival in rivals),
    )


def _near(found: Verdicts, limits: Limits) -> Iterator[Measured]:
    """Divergence and agreement on all texts, on those of each source, and after switches of models."""
    guided = Mask.GUIDED.value
    yield _below("divergence", limits.divergence, found.divergence[guided])
    yield _above("agreement", limits.agreement, found.agreement[guided])
    for switches in SWITCHES:
        name = after(switches)
        yield _below(f"divergence {name}", limits.divergence, found.divergence[name])
        yield _above(f"agreement {name}", limits.agreement, found.agreement[name])
    for source in dict.fromkeys(found.sources):
        own = [one for one, of in zip(found.divergence[guided], found.sources, strict=True) if of == source]
        mean = statistics.fmean(own)
        # So few texts have no useful interval.
        yield _measured(f"divergence, {source}", limits.divergence, mean, None, mean <= limits.divergence)


def _below(name: str, limit: float, values: Sequence[float]) -> Measured:
    interval = mean_interval(values)
    return _measured(name, limit, statistics.fmean(values), interval, interval.high <= limit)


def _above(name: str, limit: float, values: Sequence[float]) -> Measured:
    interval = mean_interval(values)
    return _measured(name, limit, statistics.fmean(values), interval, interval.low >= limit)


def _fallen(name: str, scores: dict[str, list[float]] | dict[str, list[bool]], limit: float) -> Measured:
    dense = statistics.fmean(scores[Mask.DENSE])
    lost = dense - statistics.fmean(scores[Mask.GUIDED])
    # Where the dense run knows nothing either, nothing is shown.
    return _measured(name, limit, lost, None, dense > 0 and lost <= limit + 1e-9)


def _against(found: Verdicts, rival: str) -> Measured:
    share, interval = divergence_over(found, rival)
    return _measured(f"over {rival}", 1.0, share, interval, interval.high < 1.0)


def _recalls_no_less(found: Verdicts, rival: str) -> Measured:
    """Share of facts that are recalled beyond a rival's; where models recall little, 0 is all that can be wanted."""
    beyond, interval = recalled_beyond(found, rival)
    return _measured(f"recall beyond {rival}", 0.0, beyond, interval, beyond >= -1e-9)


def recalled_beyond(found: Verdicts, other: str) -> tuple[float, Interval]:
    """Share of facts that the guided run recalls beyond another way, of the same facts."""
    pairs = zip(found.recalled[Mask.GUIDED], found.recalled[other], strict=True)
    beyond = [float(own) - float(of) for own, of in pairs]
    return statistics.fmean(beyond), mean_interval(beyond)


def divergence_over(found: Verdicts, other: str) -> tuple[float, Interval]:
    """Divergence of the guided run as a share of another way's, on the same texts: the geometric mean."""
    pairs = zip(found.divergence[Mask.GUIDED], found.divergence[other], strict=True)
    # Of a run that is dense after all nothing is left to compare.
    logs = [math.log(max(own, 1e-12) / max(of, 1e-12)) for own, of in pairs]
    reach = mean_interval(logs)
    return math.exp(statistics.fmean(logs)), Interval(math.exp(reach.low), math.exp(reach.high))


def _measured(name: str, limit: float, value: float, interval: Interval | None, passed: bool) -> Measured:
    low, high = (interval.low, interval.high) if interval else (None, None)
    return Measured(name=name, limit=limit, value=value, low=low, high=high, passed=passed)
