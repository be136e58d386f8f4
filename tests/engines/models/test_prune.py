from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from engines.models import prepare
from engines.models.errors import LayerChoiceError, UnusableFolderError
from engines.models.influence import block_influence
from engines.models.loading import LoadedModel, load
from engines.models.perplexity import without_layers
from engines.models.prune import drop_layers
from engines.models.safetensors_file import read

if TYPE_CHECKING:
    from pathlib import Path

IDS = list(range(1000, 1100))


@pytest.fixture(scope="module")
def tiny(root: Path) -> Path:
    return prepare("tiny-qwen3", root)


@pytest.fixture
def loaded(tiny: Path) -> LoadedModel:
    return load(tiny)


def weights(folder: Path) -> dict[str, bytes]:
    return {tensor.name: tensor.read() for tensor in read(folder / "model.safetensors")}


def layer_weights(everything: dict[str, bytes], layer: int) -> dict[str, bytes]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): data for name, data in everything.items() if name.startswith(prefix)}


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = loaded.model(torch.tensor([IDS]), use_cache=False).logits
    return result


def test_dropping_keeps_the_bytes_of_the_other_layers(tiny: Path, tmp_path: Path) -> None:
    drop_layers(tiny, {1, 4}, tmp_path)
    source, pruned = weights(tiny), weights(tmp_path)
    for new, old in enumerate([0, 2, 3, 5]):
        assert layer_weights(pruned, new) == layer_weights(source, old)
    outer = {name for name in source if not name.startswith("model.layers.")}
    assert {name: pruned[name] for name in outer} == {name: source[name] for name in outer}
    # The control: a layer under its old number would not pass for the same.
    assert layer_weights(pruned, 1) != layer_weights(source, 1)


def test_dropping_in_memory_equals_dropping_in_files(tiny: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    drop_layers(tiny, {0, 3}, tmp_path)
    with without_layers(loaded, {0, 3}) as rest:
        in_memory = logits(rest)
        generated = rest.model.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False)
    from_files = load(tmp_path)
    assert torch.equal(in_memory, logits(from_files))
    again = from_files.model.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, again)


def test_layers_are_put_back(loaded: LoadedModel) -> None:
    before = logits(loaded)
    with without_layers(loaded, [1]) as rest:
        assert not torch.equal(logits(rest), before)
    assert torch.equal(logits(loaded), before)
    assert loaded.model.config.num_hidden_layers == 6


def test_dropped_config_counts_the_layers_left(tiny: Path, tmp_path: Path) -> None:
    drop_layers(tiny, [5], tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 5


@pytest.mark.parametrize("layers", [[6], [-1], range(6)], ids=["too-high", "negative", "all"])
def test_impossible_choice_is_refused_in_files_and_in_memory(
    tiny: Path, loaded: LoadedModel, tmp_path: Path, layers: list[int]
) -> None:
    with pytest.raises(LayerChoiceError, match=r"layers 0\.\.5"):
        drop_layers(tiny, layers, tmp_path)
    with pytest.raises(LayerChoiceError), without_layers(loaded, layers):
        pass
    assert list(tmp_path.iterdir()) == []


def test_source_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableFolderError):
        drop_layers(tmp_path, [0], tmp_path)


def test_identity_layer_has_no_influence_and_others_have(loaded: LoadedModel) -> None:
    with torch.no_grad():
        loaded.layers[2].self_attn.o_proj.weight.zero_()
        loaded.layers[2].mlp.down_proj.weight.zero_()
    influence = block_influence(loaded, IDS, window=64)
    assert len(influence) == 6
    assert influence[2] == pytest.approx(0.0, abs=1e-12)
    assert min(value for layer, value in enumerate(influence) if layer != 2) > 0.01


def test_influence_is_a_mean_over_positions_however_they_are_cut(loaded: LoadedModel) -> None:
    # Windows of one token: each position has only itself, so the order of windows cannot matter.
    assert block_influence(loaded, IDS, window=1) == pytest.approx(block_influence(loaded, IDS[::-1], window=1))


def test_influence_of_nothing_is_an_error(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        block_influence(loaded, [])
