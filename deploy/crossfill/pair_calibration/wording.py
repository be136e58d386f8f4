"""What a calibration of a pair found, in tables and sentences."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from engines.reuse.study.masks import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from engines.calibration.calibration import Calibrated
    from engines.calibration.trial import Candidate
    from engines.reuse.artifact import Measured

ALIGNED = {"suffix": "by suffixes", "ordered": "in the order that fits best"}

_SHOWN = 12
_CANDIDATE = ("heads", "from layer", "top-p", "KL", "same", "density", "saved", "")
_FIGURE = ("figure", "limit", "measured", "", "")


def tables(found: Calibrated) -> Iterator[Table]:
    """What was tried, and what the gate measured; within 80 columns."""
    yield _table(f"Tried on {found.wanted.choice} texts", CANDIDATES_CAPTION, candidate_rows(found, most=_SHOWN))
    yield _table("The gate, on texts that nothing was chosen by", GATE_CAPTION, gate_rows(found))


CANDIDATES_CAPTION = (
    "KL × 1000 from the dense run; same: share of tokens where both would say the same next; saved: share of all "
    "attention that is left out. ←: chosen."
)
GATE_CAPTION = (
    "Mean (95 % interval); its unfavourable end counts. over …: KL as a share of that of a mask as dense that is made "
    "without the sender."
)


def sentences(found: Calibrated) -> Iterator[str]:
    """What holds, in words."""
    sender, receiver = found.sender.name, found.receiver.name
    guided = range(found.chosen.first_layer, found.receiver.layers - 1)
    variation = [found.profile.variation[layer, found.alignment.layers[layer]] for layer in guided]
    yield (
        f"Layers are aligned {ALIGNED[found.alignment.name]}: attention of {receiver}'s guided layers differs from its "
        f"mixture of {sender}'s by {statistics.fmean(variation):.2f} on average (0: equal, 1: nothing in common), and "
        f"by {statistics.fmean(_other(found, guided)):.2f} if aligned {ALIGNED[found.other.name]}."
    )
    recall = {mask: found.verdicts.recall(mask) for mask in Mask}
    yield (
        f"Facts in the prefix are recalled in {recall[Mask.DENSE]:.0%} of cases densely, {recall[Mask.GUIDED]:.0%} "
        f"guided, {recall[Mask.WINDOW]:.0%} with the nearest blocks and {recall[Mask.RANDOM]:.0%} with random ones."
    )
    failed = [one.name for one in found.gate if not one.passed]
    if failed:
        yield f"The pair is refused, because of: {', '.join(failed)}. Workers that are given it prefill densely."
    else:
        yield (
            f"The pair may be used: guided from layer {found.chosen.first_layer} on, top-p {found.chosen.top_p}, it "
            f"looks at {statistics.fmean(found.verdicts.density):.0%} of the blocks of {found.wanted.tokens} tokens."
        )
    yield f"All that took {sum(found.seconds.values()) / 60:.1f} minutes: " + ", ".join(
        f"{name} {seconds:.0f} s" for name, seconds in found.seconds.items()
    )


def _other(found: Calibrated, guided: Sequence[int]) -> list[float]:
    return [float(found.profile.variation[layer, found.other.layers[layer]]) for layer in guided]


def candidate_rows(found: Calibrated, *, most: int | None = None) -> list[Sequence[str]]:
    """Head, then every candidate, what saves most first; at most `most`, the chosen one among them."""
    layers = found.receiver.layers
    ranked = sorted(found.tried, key=lambda one: -found.tried[one].saved(one, layers))
    if most is not None:
        # With those around it: what saves more and was not good enough, and what saves less.
        first = max(0, min(ranked.index(found.chosen) - most // 2, len(ranked) - most))
        ranked = ranked[first : first + most]
    return [_CANDIDATE, *(_candidate(found, one) for one in ranked)]


def _candidate(found: Calibrated, one: Candidate) -> Sequence[str]:
    tried = found.tried[one]
    return (
        one.rule.value,
        str(one.first_layer),
        f"{one.top_p:g}",
        f"{1000 * statistics.fmean(tried.divergence):.1f}",
        f"{statistics.fmean(tried.agreement):.1%}",
        f"{statistics.fmean(tried.density):.2f}",
        f"{tried.saved(one, found.receiver.layers):.2f}",
        "←" if one == found.chosen else "",
    )


def gate_rows(found: Calibrated) -> list[Sequence[str]]:
    """Head, then every figure."""
    return [_FIGURE, *map(_figure, found.gate)]


def _figure(one: Measured) -> Sequence[str]:
    interval = "" if one.low is None or one.high is None else f"({one.low:.4f}–{one.high:.4f})"
    return one.name, f"{one.limit:g}", f"{one.value:.4f}", interval, "PASS" if one.passed else "FAIL"


def _table(title: str, caption: str, rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title, caption=caption, caption_justify="left")
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if place else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table
