"""What a calibration of a pair found, in tables and sentences."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

from crossfill.console_table import ruled
from engines.calibration.gate import divergence_over, recalled_beyond
from engines.reuse.settings import ReuseMode
from engines.reuse.study.masks import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from engines.calibration.calibration import Calibrated
    from engines.calibration.trial import Candidate
    from engines.reuse.artifact import Measured

ALIGNED = {"suffix": "by suffixes", "ordered": "in the order that fits best"}

_SHOWN = 12
_MODES = {ReuseMode.GUIDED: "guided", ReuseMode.MAP: "by maps", ReuseMode.HYBRID: "by maps or guided"}
_CANDIDATE = ("heads", "from layer", "top-p", "KL", "same", "density", "saved", "")
_FIGURE = ("figure", "limit", "measured", "", "")
_WAY = ("as dense as guided", "KL", "guided ÷ it", "recall", "guided beyond it")


def tables(found: Calibrated) -> Iterator[Table]:
    """What was tried, and what the gate measured; within 80 columns."""
    yield ruled(f"Tried on {found.wanted.choice} texts", CANDIDATES_CAPTION, candidate_rows(found, most=_SHOWN))
    yield ruled("What else is as dense, on texts that nothing was chosen by", WAYS_CAPTION, way_rows(found))
    yield ruled("The gate, on texts that nothing was chosen by", GATE_CAPTION, gate_rows(found))


CANDIDATES_CAPTION = (
    "KL × 1000 from the dense run; same: share of tokens where both would say the same next; saved: share of all "
    "attention that is left out. 4-8:.9: another top-p in layers 4 to 8; maps≤.5: layers of "
    "whose map no more is kept are computed by it, at half the work. ←: chosen."
)
WAYS_CAPTION = (
    "KL × 1000 from the dense run, and share of facts recalled; random and sink + window: blocks chosen without the "
    "sender; all others: ways to mix its heads. Geometric means and means with 95 % intervals."
)
GATE_CAPTION = (
    "Mean (95 % interval); its unfavourable end counts. over …: KL as a share of that of another way that is as dense; "
    "recall beyond …: share of facts recalled beyond it."
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
    share = statistics.fmean(one.variation for layer, one in found.maps.items() if layer in guided)
    yield f"Whole maps differ from their best mixtures by {share:.2f} on average: so far map reuse would be wrong."
    yield from _of_maps(found)
    if found.losses:
        third = max(1, len(found.losses) // 3)
        first, last = (statistics.fmean(part) for part in (found.losses[:third], found.losses[-third:]))
        yield (
            f"Training in {len(found.losses)} steps brought the divergence of what is said after a guided text from "
            f"{first:.4f} to {last:.4f} nats (mean of the first and of the last {third})."
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
            f"The pair may be used: {_MODES[found.chosen.mode]} from layer {found.chosen.first_layer} on, top-p "
            f"{_top_p(found.chosen)}, it looks at {found.verdicts.density:.0%} of the blocks of "
            f"{found.wanted.gate_tokens} tokens where it is guided."
        )
    yield f"All that took {sum(found.seconds.values()) / 60:.1f} minutes: " + ", ".join(
        f"{name} {seconds:.0f} s" for name, seconds in found.seconds.items()
    )


def _of_maps(found: Calibrated) -> Iterator[str]:
    """What maps would have come to, if they were tried."""
    tried = {one: statistics.fmean(of.divergence) for one, of in found.tried.items() if one.map_density}
    if not tried:
        return
    whole = min(far for one, far in tried.items() if one.mode is ReuseMode.MAP)
    nearest = min(tried, key=lambda one: tried[one])
    yield (
        f"By maps in all layers the divergence on the texts to choose by is {whole:.4f} nats at the least, by maps in "
        f"layers of whose map no more than {nearest.map_density:.0%} is kept {tried[nearest]:.4f}. "
        + ("They are used." if found.chosen.map_density else "Nothing of that leaves out more work within the limits.")
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
        _top_p(one),
        f"{1000 * statistics.fmean(tried.divergence):.1f}",
        f"{statistics.fmean(tried.agreement):.1%}",
        f"{statistics.fmean(tried.density):.2f}",
        f"{tried.saved(one, found.receiver.layers):.2f}",
        "←" if one == found.chosen else "",
    )


def _top_p(one: Candidate) -> str:
    """The usual one, and those of groups of layers that have another."""
    kept = [list(layers) for _, layers in itertools.groupby(one.layer_top_p, key=lambda pair: pair[1])]
    maps = [f"maps≤{one.map_density:g}"] if one.map_density else []
    return " ".join([f"{one.top_p:g}", *(f"{own[0][0]}-{own[-1][0]}:{own[0][1]:g}" for own in kept), *maps])


def way_rows(found: Calibrated) -> list[Sequence[str]]:
    """Head, then every way that was compared at equal density, the guided one first."""
    verdicts = found.verdicts
    rows: list[Sequence[str]] = [_WAY]
    for name in verdicts.compared:
        kl, recall = 1000 * statistics.fmean(verdicts.divergence[name]), verdicts.recall(name)
        shares = ("", "")
        if name != Mask.GUIDED:
            share, of = divergence_over(verdicts, name)
            beyond, by = recalled_beyond(verdicts, name)
            shares = (f"{share:.2f} ({of.low:.2f}–{of.high:.2f})", f"{beyond:+.2f} ({by.low:+.2f}–{by.high:+.2f})")
        shown = f"guided: {found.chosen.rule.value}" if name == Mask.GUIDED else name
        rows.append((shown, f"{kl:.1f}", shares[0], f"{recall:.2f}", shares[1]))
    return rows


def gate_rows(found: Calibrated) -> list[Sequence[str]]:
    """Head, then every figure."""
    return [_FIGURE, *map(_figure, found.gate)]


def _figure(one: Measured) -> Sequence[str]:
    interval = "" if one.low is None or one.high is None else f"({one.low:.4f}–{one.high:.4f})"
    return one.name, f"{one.limit:g}", f"{one.value:.4f}", interval, "PASS" if one.passed else "FAIL"
