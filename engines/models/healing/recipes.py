"""The recipes of the healed models that ship: which layers went, and how long the rest was trained."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from engines.models.errors import UnknownModelError
from engines.models.healing.recipe import Recipe
from engines.models.healing.training import Plan, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "smollm2-113m-healed": Recipe(Plan(stages=(Stage((3, 4, 5, 12, 25, 26), 480),), fade_steps=80, seed=1)),
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
