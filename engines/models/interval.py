"""95 % intervals of shares, of medians, and of ratios between two models that were measured on the same things."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Two-sided 95 %.
_Z = 1.959964
# Losses of neighbouring tokens depend on each other; sums over blocks of so many do much less.
BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """A figure of one model divided by a reference model's, with its 95 % interval; 1 is equal."""

    value: float
    low: float
    high: float


def wilson(right: float, of: float, z: float = _Z) -> Interval:
    """Score interval of a share (Wilson 1927).

    Raises:
        ValueError: not 0 <= right <= of, or `of` is 0.
    """
    if not 0 <= right <= of or of == 0:
        raise ValueError(f"need 0 <= right <= of and of > 0, got {right} of {of}")
    share = right / of
    middle = share + z * z / (2 * of)
    reach = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    # Exactly 0 and 1 at the ends, where rounding would leave a little.
    low = 0.0 if right == 0 else (middle - reach) / scale
    high = 1.0 if right == of else (middle + reach) / scale
    return Interval(low, high)


def share_ratio(model: Sequence[bool], reference: Sequence[bool]) -> Ratio | None:
    """Ratio of two shares over the same questions, paired; None if either model has none right.

    The hybrid score interval of Bonett and Price, "Confidence intervals for a ratio of binomial proportions based on
    paired data", Statistics in Medicine 25, 2006. What both got wrong says nothing about a ratio and is left out there.

    Raises:
        ValueError: not the same number of questions.
    """
    if len(model) != len(reference):
        raise ValueError(f"need the same questions, got {len(model)} and {len(reference)} questions")
    pairs = list(zip(model, reference, strict=True))
    mine, theirs = sum(model), sum(reference)
    if not mine or not theirs:
        return None
    any_right = sum(one or other for one, other in pairs)
    apart = sum(one != other for one, other in pairs)
    spread_both = math.sqrt((apart + 2) / ((mine + 1) * (theirs + 1)))
    spread_mine, spread_theirs = (
        math.sqrt((1 - (right + 1) / (any_right + 2)) / (right + 1)) for right in (mine, theirs)
    )
    # Two single intervals of this width together cover the ratio with 95 %.
    z = _Z * spread_both / (spread_mine + spread_theirs)
    one, other = wilson(mine, any_right, z), wilson(theirs, any_right, z)
    return Ratio(mine / theirs, one.low / other.high, one.high / other.low)


def perplexity_ratio(model: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Ratio of two perplexities from the losses (nats) of the same tokens, paired, by blocks of `BLOCK_TOKENS`.

    The interval is Student's t over the blocks, of which the answers in chat format make only ten.

    Raises:
        ValueError: not the same number of tokens, or fewer than two blocks.
    """
    if len(model) != len(reference):
        raise ValueError(f"need the same text, got {len(model)} and {len(reference)} tokens")
    differences = [one - other for one, other in zip(model, reference, strict=True)]
    count = len(differences)
    blocks = [differences[begin : begin + BLOCK_TOKENS] for begin in range(0, count, BLOCK_TOKENS)]
    if len(blocks) < 2:
        raise ValueError(f"need more than {BLOCK_TOKENS} tokens for an interval, got {count}")
    mean = math.fsum(differences) / count
    squares = math.fsum((math.fsum(block) - mean * len(block)) ** 2 for block in blocks)
    error = math.sqrt(squares * len(blocks) / (len(blocks) - 1)) / count
    reach = student_t(len(blocks) - 1) * error
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def median_interval(values: Sequence[float]) -> Interval | None:
    """Between which two of the values their median lies, whatever their distribution; None for fewer than six.

    The narrowest pair of order statistics, equally far from both ends, whose binomial probability reaches 95 %.
    """
    ordered, count = sorted(values), len(values)
    below, place = 0.0, -1
    # `below`: the probability that at most `place` values lie below the median.
    while below + math.comb(count, place + 1) / 2**count <= 0.025:
        place += 1
        below += math.comb(count, place) / 2**count
    return None if place < 0 else Interval(ordered[place], ordered[count - 1 - place])


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


def student_t(degrees: int) -> float:
    """How far from 0 Student's t reaches with 95 %, for `degrees` of freedom; by bisection.

    Raises:
        ValueError: `degrees` is not positive.
    """
    if degrees < 1:
        raise ValueError(f"need at least one degree of freedom, got {degrees}")
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The probability of |t| < sqrt(degrees) · tan(angle): Abramowitz and Stegun 26.7.3 and 26.7.4, a finite sum."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
