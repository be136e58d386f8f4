"""Exercises whose answer stands earlier in the text: what a model loses first when layers are dropped.

None of the words, facts or questions of the needle test (`engines.models.needle`) is used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

# Lists of words read best as text.
_NAMES = """
Adele Boris Carmen Dmitri Elena Farid Greta Hugo Ines Jonas Katya Leon Mara Nils Olga Pavel Rosa Sven Tara Umar Vera
Willem Xenia Yusuf Zoe
""".split()  # noqa: SIM905
_THINGS = """
badge locker ticket invoice parcel cabin engine ledger sample shelf beacon crate filter gauge hatch magnet permit pump
relay sensor signal turbine valve voucher wagon
""".split()  # noqa: SIM905
_WORDS = """
anchor basil candle dune ember fable glacier harp ivory jasmine kettle lagoon mosaic nectar opal pepper quartz raven
saddle tundra umbra velvet walnut yarrow zephyr
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Exercise:
    """A `context`, and questions about it with their answers."""

    context: str
    turns: tuple[tuple[str, str], ...]


def exercise(rng: random.Random, filler: Sequence[str], facts: int, questions: int) -> Exercise:
    """`facts` facts strewn over the sentences of `filler`, and `questions` about different ones of them."""
    keys = rng.sample([(name, thing) for name in _NAMES for thing in _THINGS], facts)
    values = [_value(rng) for _ in keys]
    style = rng.choice(_STYLES)
    made = [style(name, thing, value) for (name, thing), value in zip(keys, values, strict=True)]
    asked = rng.sample(made, min(questions, facts))
    context = _strew(rng, [fact for fact, _, _ in made], filler)
    return Exercise(context, tuple((question, answer) for _, question, answer in asked))


def _record(name: str, thing: str, value: str) -> tuple[str, str, str]:
    return f"{name}, {thing}: {value}.", f"Which entry belongs to {name}, {thing}?", value


def _mark(name: str, thing: str, value: str) -> tuple[str, str, str]:
    fact = f"The {thing} of {name} is marked {value}."
    return fact, f"How is the {thing} of {name} marked?", fact


def _keeping(name: str, thing: str, value: str) -> tuple[str, str, str]:
    fact = f"{name} keeps {value} in the {thing}."
    return fact, f"What does {name} keep in the {thing}?", fact


def _number(name: str, thing: str, value: str) -> tuple[str, str, str]:
    return f"For {name} the {thing} shows {value}.", f"Tell me what the {thing} shows for {name}. Only that.", value


_STYLES = (_record, _mark, _keeping, _number)


def _value(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return str(rng.randrange(100, 100_000))
    if kind == 1:
        return rng.choice(_WORDS)
    return f"{rng.choice(_WORDS)} {rng.randrange(10, 100)}"


def _strew(rng: random.Random, lines: Sequence[str], filler: Sequence[str]) -> str:
    places = sorted(rng.randrange(len(filler) + 1) for _ in lines)
    parts: list[str] = []
    taken = 0
    for place, line in zip(places, lines, strict=True):
        parts += [*filler[taken:place], line]
        taken = place
    return " ".join([*parts, *filler[taken:]])
