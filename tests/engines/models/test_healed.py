"""What the small model of the demo has to hold; the figures themselves are in deploy/models/README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engines.models import catalogue, prepare
from engines.models.catalogue import CATALOGUE, HEALED_24
from engines.models.judge import JudgeSize, compare, judge
from engines.models.loading import LoadedModel, load
from engines.models.merge import shipped_adapter
from engines.models.perplexity import encode, perplexity, without_layers
from engines.models.questions import ask
from engines.models.texts import Part, prose

if TYPE_CHECKING:
    from pathlib import Path

SIZE = JudgeSize(prose_tokens=768, dialogues=2, conversations=4, needles=6, needle_tokens=400, questions=0)


@pytest.fixture(scope="module")
def healed(root: Path) -> LoadedModel:
    return load(prepare(HEALED_24, root))


def dropped() -> tuple[int, ...]:
    recipe = CATALOGUE[HEALED_24].recipe
    assert isinstance(recipe, catalogue.HealedRecipe)
    return shipped_adapter(recipe).dropped_layers


@pytest.mark.parametrize("name", catalogue.DEMO[1:])
def test_healed_models_are_named_after_their_parameters(name: str) -> None:
    assert name == f"smollm2-{round(CATALOGUE[name].parameters / 1e6)}m-healed"


def test_healing_brings_back_most_of_what_dropping_cost(healed: LoadedModel, smollm2_model: LoadedModel) -> None:
    assert len(dropped()) == 6
    ids = encode(smollm2_model, prose(Part.HELDOUT), 768)
    with without_layers(smollm2_model, dropped()) as rest:
        cut = perplexity(rest, ids).value
    whole = perplexity(smollm2_model, ids).value
    # The control: without training it is more than twice the whole model's.
    assert cut > 1.8 * whole
    assert perplexity(healed, ids).value < 1.35 * whole


def test_healed_model_stays_near_the_whole_one(healed: LoadedModel, smollm2_model: LoadedModel) -> None:
    judged, whole = judge(healed, "healed", SIZE), judge(smollm2_model, "whole", SIZE)
    ratios = compare(judged, whole)
    assert ratios.prose.value < 1.35
    assert ratios.chat.value < 1.4
    assert ratios.conversations is not None
    assert ratios.conversations.value < 1.65
    assert judged.recall is not None
    assert judged.recall.right >= 2


def test_healed_model_answers_some_easy_questions(healed: LoadedModel) -> None:
    # Measured: 7 of 30, and 15 for the whole model.
    assert sum(answer.right for answer in ask(healed)) >= 5
