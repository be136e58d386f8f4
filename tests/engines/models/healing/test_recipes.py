from __future__ import annotations

import pytest

from engines.models.adapter_file import MAX_RANK
from engines.models.catalogue import CATALOGUE, HealedRecipe, entry_of
from engines.models.errors import UnknownModelError
from engines.models.healing.recipes import RECIPES, recipe_of


@pytest.mark.parametrize("name", RECIPES)
def test_stages_drop_layers_of_the_base_and_never_bring_one_back(name: str) -> None:
    recipe = recipe_of(name)
    before: set[int] = set()
    for stage in recipe.plan.stages:
        assert before < set(stage.dropped) < set(range(entry_of(recipe.base).layers))
        assert len(set(stage.dropped)) == len(stage.dropped)
        before = set(stage.dropped)
    # The fade of the last stage ends.
    assert recipe.plan.stages[-1].steps >= recipe.plan.fade_steps
    assert recipe.plan.rank <= MAX_RANK


def test_every_healed_model_of_the_catalogue_has_a_recipe_and_no_other() -> None:
    healed = {entry.name for entry in CATALOGUE.values() if isinstance(entry.recipe, HealedRecipe)}
    assert set(RECIPES) == healed


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match="did you mean 'smollm2-113m-healed'"):
        recipe_of("smollm2-113-healed")
