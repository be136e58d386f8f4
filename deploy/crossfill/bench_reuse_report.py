"""From raw times to the figures of `crossfill bench reuse`, and whether they reach what was aimed at."""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from crossfill.console_table import ruled
from crossfill.machine import describe_machine
from engines.models.interval import Interval, median_interval, wilson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table

    from crossfill.bench_reuse_workers import Answer, Rounds
    from engines.reuse.settings import PairSettings
    from engines.reuse.study.quality import QualityStudy
    from engines.reuse.study.timing import AttentionTimes

OVER_BOUND = 1.05
REFUSED = 1.05
SENDER = 1.10
STORED = 1 / 100
RECALL = 0.05

_LEAST_FOR_P99 = 100


@dataclass(frozen=True)
class ReuseBench:
    """What to run.

    Attributes:
        pair: the receiver's settings of the sender.
        receiver: name of the model that takes.
        tokens: lengths of prompts, whole row blocks.
        rounds: of every time to first token.
        texts: continuations of each length.
        needles: to recall at each length.
        seed: of texts, facts and random masks.
    """

    pair: PairSettings
    receiver: str
    tokens: tuple[int, ...] = (1024, 2048, 4096, 7680)
    rounds: int = 12
    texts: int = 3
    needles: int = 40
    seed: int = 0


QUICK: dict[str, Any] = {"tokens": (1024, 2048), "rounds": 3, "texts": 1, "needles": 8}
"""What a run of minutes changes of a `ReuseBench`."""


@dataclass(frozen=True)
class Figures:
    """All of one length.

    Attributes:
        rounds: times of the workers.
        times: of the receiver's attention, in one process.
        study: quality, in one process.
        kv_bytes: of the sender's own keys and values, a token a layer, as its worker keeps them.
    """

    tokens: int
    rounds: Rounds
    times: AttentionTimes
    study: QualityStudy
    kv_bytes: int

    @property
    def share(self) -> float:
        """s: of the receiver's dense time to first token, what its attention takes."""
        return statistics.median(one.attention_s / one.ttft_s for one in self.rounds.dense)

    @property
    def bound(self) -> float:
        """Least ratio that guiding can reach."""
        return bound(self.share, self.times.share, self.times.speed_up)

    @property
    def guided(self) -> Ratios:
        """Time to first token, guided over dense."""
        return ratios(self.rounds.guided, self.rounds.dense)

    @property
    def guided_cpu(self) -> Ratios:
        """Processor time, guided over dense: what other programs on the machine do changes it little."""
        return ratios(self.rounds.guided, self.rounds.dense, lambda answer: answer.cpu_s)

    @property
    def refused(self) -> Ratios:
        """… of requests that nothing is stored for, over those for which nothing is looked up."""
        return ratios(self.rounds.refused, self.rounds.dense)

    @property
    def published(self) -> Ratios:
        """… of the sender's requests that leave masses, over those that do not."""
        return ratios(self.rounds.published, self.rounds.plain)

    @property
    def stored(self) -> float:
        """Stored bytes as a share of the sender's keys and values."""
        return self.study.stored_bytes / self.kv_bytes


@dataclass(frozen=True)
class Ratios:
    """Of paired times.

    Attributes:
        median: over the rounds.
        interval: of the median, 95 %; None for fewer than six rounds.
        p99: None for fewer than 100 rounds.
    """

    median: float
    interval: Interval | None
    p99: float | None


def bound(share: float, guided: float, speed_up: float) -> float:
    """1 - s·f·(1 - 1/k): what is left of a prefill of which the share s·f becomes k times as fast."""
    return 1 - share * guided * (1 - 1 / speed_up)


def ratios(
    above: Sequence[Answer], below: Sequence[Answer], value: Callable[[Answer], float] = lambda answer: answer.ttft_s
) -> Ratios:
    """Of times to first token or another value, round by round."""
    each = [value(one) / value(other) for one, other in zip(above, below, strict=True)]
    p99 = statistics.quantiles(each, n=100)[98] if len(each) >= _LEAST_FOR_P99 else None
    return Ratios(statistics.median(each), median_interval(each), p99)


def recall_holds(guided: float, dense: float, window: float) -> bool | None:
    """Whether guided recall is near the dense one; None where a mask without a sender is near it too."""
    if window >= dense - RECALL:
        return None
    return guided >= dense - RECALL


def verdict(holds: bool | None) -> str:
    """As a table says it; a dash where nothing can be said."""
    return "–" if holds is None else "PASS" if holds else "FAIL"


def verdicts(one: Figures) -> dict[str, bool | None]:
    """Every target by name: reached, missed, or None where these rounds cannot tell."""
    from engines.reuse.study.masks import Mask

    refused, recalls = one.refused.interval, {mask: of.recall for mask, of in one.study.masks.items()}
    return {
        "guided": one.guided.median <= OVER_BOUND * one.bound,
        "refused": None if refused is None else refused.high <= REFUSED,
        "sender": one.published.median <= SENDER,
        "stored": one.stored <= STORED,
        "recall": recall_holds(recalls[Mask.GUIDED], recalls[Mask.DENSE], recalls[Mask.WINDOW]),
    }


def report(bench: ReuseBench, figures: Sequence[Figures]) -> dict[str, Any]:
    """Everything as JSON data, with what is needed to repeat it."""
    return {
        "machine": describe_machine(),
        "command": sys.argv,
        "bench": {**asdict(bench), "pair": bench.pair.model_dump(mode="json")},
        "targets": {"bound": OVER_BOUND, "refused": REFUSED, "sender": SENDER, "stored": STORED, "recall": RECALL},
        "lengths": [_as_data(one) for one in figures],
    }


def _as_data(one: Figures) -> dict[str, Any]:
    return {
        "tokens": one.tokens,
        "s": one.share,
        "f": one.times.share,
        "k": one.times.speed_up,
        "k_prepared": one.times.speed_up_prepared,
        "bound": one.bound,
        "guided": asdict(one.guided),
        "guided_cpu": asdict(one.guided_cpu),
        "refused": asdict(one.refused),
        "sender": asdict(one.published),
        "stored_bytes_a_token_a_layer": one.study.stored_bytes,
        "kv_bytes_a_token_a_layer": one.kv_bytes,
        "verdicts": verdicts(one),
        "rounds": asdict(one.rounds),
        "attention": asdict(one.times),
        "quality": {mask.value: asdict(quality) for mask, quality in one.study.masks.items()},
    }


def tables(bench: ReuseBench, figures: Sequence[Figures]) -> Iterator[Table]:
    """Everything measured, for people, within 80 columns."""
    pair = f"{bench.pair.sender.name} → {bench.receiver}"
    yield ruled(
        f"Time to first token, s, {pair}",
        f"Medians of {bench.rounds} paired rounds (95 % interval). ×: the ratio over the bound, at most {OVER_BOUND} "
        "wanted. again: rounds made again, as the store was too slow.",
        (("tokens", "dense", "guided", "guided / dense", "bound", "×", "", "again"), *map(_times, figures)),
        words=(),
    )
    yield ruled(
        "What bounds that: 1 - s·f·(1 - 1/k)",
        "density: kept blocks over causal ones; s: attention's share of dense; f: guided layers' share of that; "
        "k: dense over guided time of these; k all: if preparing took of that time too. CPU: guided over dense in "
        "processor time, which other programs change less than the time to first token.",
        (("tokens", "density", "s", "f", "k", "k all", "bound", "CPU"), *map(_bounds, figures)),
        words=(),
    )
    yield ruled(
        "Where a guided prefill's time goes, ms",
        "want: dense attention without what k saves. rest: all but attention and waiting for the store. late: layers "
        "computed densely as their masses had not come. prepare: unpacking, mixing, selecting, in the background.",
        (
            ("tokens", "attention", "guided", "want", "rest", "guided", "waited", "late", "prepare"),
            *map(_parts, figures),
        ),
        words=(),
    )
    yield ruled(
        "What reuse costs those it does not help",
        "refused: nothing is stored, over reuse off. sender: with publishing over without; ms until all is stored, "
        "after the answer. stored: bytes over those of the sender's keys and values, at most 1/100 wanted.",
        (("tokens", "refused", "", "sender", "", "ms", "stored", ""), *map(_costs, figures)),
        words=(),
    )
    yield ruled(
        "The receiver after a prefix under each mask",
        "KL × 1000 from its dense run, and the share of tokens where both say the same next; recall of facts that are "
        "asked for and told within the prefix. Controls are as dense as guided, list by list.",
        (("tokens", "mask", "density", "KL", "same", "recall", ""), *(row for one in figures for row in _quality(one))),
        words=("mask",),
    )


def _times(one: Figures) -> Sequence[str]:
    guided = one.guided
    return (
        str(one.tokens),
        f"{_median(one.rounds.dense, lambda answer: answer.ttft_s):.2f}",
        f"{_median(one.rounds.guided, lambda answer: answer.ttft_s):.2f}",
        _with_interval(guided),
        _short(one.bound),
        _short(guided.median / one.bound),
        verdict(verdicts(one)["guided"]),
        str(len(one.rounds.again)),
    )


def _bounds(one: Figures) -> Sequence[str]:
    times = one.times
    values = (times.density, one.share, times.share, times.speed_up, times.speed_up_prepared, one.bound)
    return (str(one.tokens), *map(_short, values), _with_interval(one.guided_cpu))


def _parts(one: Figures) -> Sequence[str]:
    dense, guided, times = one.rounds.dense, one.rounds.guided, one.times
    attention_s = _median(dense, lambda answer: answer.attention_s)
    return (
        str(one.tokens),
        _ms(attention_s),
        _ms(_median(guided, lambda answer: answer.attention_s)),
        _ms(attention_s * bound(1, times.share, times.speed_up)),
        _ms(_median(dense, lambda answer: answer.rest_s)),
        _ms(_median(guided, lambda answer: answer.rest_s)),
        _ms(_median(guided, lambda answer: answer.waited_s)),
        f"{statistics.fmean(answer.missed_layers for answer in guided):.1f}",
        _ms(statistics.median(times.prepare_s)),
    )


def _costs(one: Figures) -> Sequence[str]:
    held = verdicts(one)
    return (
        str(one.tokens),
        _with_interval(one.refused),
        verdict(held["refused"]),
        _with_interval(one.published),
        verdict(held["sender"]),
        _ms(statistics.median(one.rounds.stored_after_s)),
        f"1/{1 / one.stored:.0f}",
        verdict(held["stored"]),
    )


def _quality(one: Figures) -> Iterator[Sequence[str]]:
    from engines.reuse.study.masks import Mask

    for mask, of in one.study.masks.items():
        right = wilson(sum(of.recalled), len(of.recalled))
        yield (
            str(one.tokens) if mask is Mask.DENSE else "",
            mask.value,
            _short(statistics.fmean(of.densities)),
            f"{1000 * statistics.fmean(of.divergence):.1f}",
            f"{statistics.fmean(of.agreement):.1%}",
            f"{_short(of.recall)} ({_short(right.low)}–{_short(right.high)})",
            verdict(verdicts(one)["recall"]) if mask is Mask.GUIDED else "",
        )


def _with_interval(found: Ratios) -> str:
    between = f" ({_short(found.interval.low)}–{_short(found.interval.high)})" if found.interval else ""
    p99 = f", p99 {_short(found.p99)}" if found.p99 is not None else ""
    return f"{_short(found.median)}{between}{p99}"


def _short(value: float) -> str:
    """Two digits after the point, and none before it that is a zero."""
    return f"{value:.2f}".removeprefix("0")


def _median(answers: Sequence[Answer], value: Callable[[Answer], float]) -> float:
    return statistics.median(map(value, answers))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"
