"""A recipe for each healed model that ships: which layers go, and how long the rest is trained.

The shipped files come from runs whose schedules differ a little: deploy/models/README.md.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from engines.models.catalogue import HEALED_20, HEALED_24
from engines.models.errors import UnknownModelError
from engines.models.healing.plan import Plan, Recipe, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST = (3, 4, 5, 25)
_SIX = (3, 4, 5, 12, 25, 26)
_EIGHT = (3, 4, 5, 6, 12, 17, 25, 26)
_TEN = (3, 4, 5, 6, 12, 14, 17, 22, 25, 26)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        HEALED_24: Recipe(Plan(stages=(Stage(_SIX, 590),), fade_steps=80, decay=0.45, seed=1)),
        HEALED_20: Recipe(
            Plan(stages=(Stage(_FIRST, 40), Stage(_SIX, 50), Stage(_EIGHT, 60), Stage(_TEN, 350)), fade_steps=25)
        ),
    }
)


def recipe_of(name: str) -> Recipe:
    """The recipe of model `name`.

    Raises:
        UnknownModelError: there is none; the error lists those there are.
    """
    try:
        return RECIPES[name]
    except KeyError:
        raise UnknownModelError(name, RECIPES) from None
