from __future__ import annotations

import json
import shutil
import sys
import warnings
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from crossfill.models_cli import app
from engines.models import CATALOGUE, adapter_file, catalogue, manifest, merge, prepare
from engines.models.adapter_file import Adapter, Factors, quantise
from engines.models.catalogue import HealedRecipe
from engines.models.errors import (
    AdapterBaseError,
    AdapterTensorError,
    DigestMismatchError,
    LayerChoiceError,
    MissingDependencyError,
    UnusableFolderError,
)
from engines.models.loading import load
from engines.models.perplexity import without_layers
from engines.models.prune import drop_layers

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

BASE = "tiny-llama"
HEALED = "healed-for-this-test"
DROPPED = (1,)
# Ranks that differ, in layers on both sides of the gap.
RANKS = {
    "model.layers.0.self_attn.q_proj.weight": 4,
    "model.layers.2.mlp.down_proj.weight": 7,
    "model.layers.3.mlp.gate_proj.weight": 3,
}
NORMS = ("model.layers.2.post_attention_layernorm.weight", "model.norm.weight")
SCALES = ("row_scale", "column_scale")
IDS = list(range(1000, 1060))


@pytest.fixture(scope="module")
def tiny(root: Path) -> Path:
    return prepare(BASE, root)


def base_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def adapter(tiny: Path) -> Adapter:
    rng, weights = np.random.default_rng(0), base_weights(tiny)

    def factors(name: str, rank: int) -> Factors:
        rows, columns = weights[name].shape
        # A change of half the weight's own size.
        size = (0.5 * weights[name].float().std().item() / rank**0.5) ** 0.5
        up, down = (size * rng.standard_normal(shape).astype(np.float32) for shape in ((rows, rank), (rank, columns)))
        return quantise(up, down)

    return Adapter(
        base=BASE,
        base_sha256=CATALOGUE[BASE].sha256["model.safetensors"],
        dropped_layers=DROPPED,
        matrices={name: factors(name, rank) for name, rank in RANKS.items()},
        values={name: rng.uniform(0.5, 1.5, 64).astype(np.float32) for name in NORMS},
    )


@pytest.fixture(scope="module")
def merged(tiny: Path, adapter: Adapter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    merge.merge(tiny, BASE, adapter, folder)
    return folder


def old_name(name: str) -> str:
    """The name in the base of a tensor of the merged model: layers 1, 2 were 2, 3."""
    for new, old in ((1, 2), (2, 3)):
        if name.startswith(f"model.layers.{new}."):
            return name.replace(f".{new}.", f".{old}.", 1)
    return name


def corrected(weight: torch.Tensor, factors: Factors) -> torch.Tensor:
    """W + delta in bfloat16, with an integer product, all in torch."""
    up, down, rows, columns = (
        torch.from_numpy(array) for array in (factors.up, factors.down, factors.row_scale, factors.column_scale)
    )
    delta = rows[:, None] * (up.long() @ down.long()).float() * columns[None, :]
    return (weight.float() + delta).bfloat16()


def logits(model: object) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([IDS]), use_cache=False).logits  # type: ignore[operator]
    return result


def test_every_merged_tensor_is_what_torch_computes(tiny: Path, adapter: Adapter, merged: Path) -> None:
    base, result = base_weights(tiny), base_weights(merged)
    kept = [name for name in base if not name.startswith("model.layers.1.")]
    assert sorted(old_name(name) for name in result) == sorted(kept)
    changed = set()
    for new, tensor in result.items():
        name = old_name(new)
        expected = base[name]
        if name in adapter.matrices:
            expected = corrected(base[name], adapter.matrices[name])
        elif name in adapter.values:
            expected = torch.from_numpy(adapter.values[name]).bfloat16()
        assert torch.equal(tensor, expected), name
        if not torch.equal(tensor, base[name]):
            changed.add(name)
    assert changed == {*RANKS, *NORMS}


def test_merged_model_answers_as_one_patched_in_memory(tiny: Path, adapter: Adapter, merged: Path) -> None:
    loaded = load(tiny)
    with without_layers(loaded, DROPPED) as rest:
        pruned = logits(rest.model)
    state = loaded.model.state_dict()
    with torch.no_grad():
        for name, factors in adapter.matrices.items():
            state[name].copy_(corrected(state[name], factors))
        for name, value in adapter.values.items():
            state[name].copy_(torch.from_numpy(value).bfloat16())
    with without_layers(loaded, DROPPED) as rest:
        patched = logits(rest.model)
    from_files = logits(load(merged).model)
    assert torch.equal(from_files, patched)
    assert (from_files - pruned).abs().max() > 0.1 * pruned.abs().max()


def test_merged_config_and_tokenizer_are_those_of_the_pruned_model(tiny: Path, merged: Path, tmp_path: Path) -> None:
    drop_layers(tiny, DROPPED, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in merged.iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert (merged / name).read_bytes() == (tmp_path / name).read_bytes()
    assert (merged / "model.safetensors").read_bytes() != (tmp_path / "model.safetensors").read_bytes()
    assert json.loads((merged / "config.json").read_text())["num_hidden_layers"] == 3


def test_zero_adapter_gives_the_pruned_model_byte_for_byte(tiny: Path, adapter: Adapter, tmp_path: Path) -> None:
    zeros = {
        name: replace(factors, row_scale=np.zeros_like(factors.row_scale)) for name, factors in adapter.matrices.items()
    }
    for name in ("zero", "pruned"):
        (tmp_path / name).mkdir()
    merge.merge(tiny, BASE, replace(adapter, matrices=zeros, values={}), tmp_path / "zero")
    drop_layers(tiny, DROPPED, tmp_path / "pruned")
    assert manifest.take("", tmp_path / "zero") == manifest.take("", tmp_path / "pruned")


def test_adapter_that_went_through_its_file_merges_to_the_same_bytes(
    tiny: Path, adapter: Adapter, merged: Path, tmp_path: Path
) -> None:
    adapter_file.write(tmp_path / "a", adapter)
    (tmp_path / "model").mkdir()
    merge.merge(tiny, BASE, adapter_file.read(tmp_path / "a"), tmp_path / "model")
    assert manifest.take("", tmp_path / "model") == manifest.take("", merged)


def test_base_with_other_weights_is_refused(tiny: Path, adapter: Adapter, tmp_path: Path) -> None:
    other, target = tmp_path / "other", tmp_path / "target"
    shutil.copytree(tiny, other)
    target.mkdir()
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        (byte,) = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(AdapterBaseError, match=r"weights of sha256 db9b.*--rebuild tiny-llama"):
        merge.merge(other, BASE, adapter, target)
    assert list(target.iterdir()) == []


def test_base_of_another_name_is_refused(tiny: Path, adapter: Adapter, tmp_path: Path) -> None:
    with pytest.raises(AdapterBaseError, match="made for 'tiny-llama', this is 'tiny-qwen3'"):
        merge.merge(tiny, "tiny-qwen3", adapter, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.layers.4.mlp.down_proj.weight", "tiny-llama has no such tensor"),
        ("model.layers.0.self_attn.q_norm.weight", "tiny-llama has no such tensor"),
        # [64, 128] where the base has [128, 64].
        ("model.layers.0.mlp.up_proj.weight", r"\(64, 128\) does not fit the base's BF16 \(128, 64\)"),
        ("model.norm.weight", "does not fit"),
    ],
    ids=["layer", "part", "shape", "vector"],
)
def test_matrix_that_the_base_lacks_is_refused(
    tiny: Path, adapter: Adapter, tmp_path: Path, name: str, text: str
) -> None:
    factors = adapter.matrices["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(AdapterTensorError, match=text):
        merge.merge(tiny, BASE, replace(adapter, matrices={name: factors}, values={}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_value_of_another_shape_is_refused(tiny: Path, adapter: Adapter, tmp_path: Path) -> None:
    short = np.ones(63, dtype=np.float32)
    with pytest.raises(AdapterTensorError, match=r"\(63,\) does not fit"):
        merge.merge(tiny, BASE, replace(adapter, values={"model.norm.weight": short}), tmp_path)


def test_dropped_layer_that_the_base_lacks_is_refused(tiny: Path, adapter: Adapter, tmp_path: Path) -> None:
    with pytest.raises(LayerChoiceError, match=r"layers 0\.\.3"):
        merge.merge(tiny, BASE, replace(adapter, dropped_layers=(4,)), tmp_path)


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_base_without_its_two_files_is_refused(tiny: Path, adapter: Adapter, tmp_path: Path, missing: str) -> None:
    base, target, steps = tmp_path / "base", tmp_path / "target", []
    shutil.copytree(tiny, base)
    (base / missing).rename(base / "model-00001-of-00002.safetensors")
    target.mkdir()
    with pytest.raises(UnusableFolderError, match=r"needs config\.json and one model\.safetensors"):
        merge.merge(base, BASE, adapter, target, progress=lambda *step: steps.append(step))
    assert (steps, list(target.iterdir())) == ([], [])


@pytest.mark.parametrize(("scale", "refused"), [(3e38, True), (1e15, False)], ids=["overflows", "large"])
def test_finite_scales_that_overflow_together_are_refused(
    tiny: Path, adapter: Adapter, tmp_path: Path, scale: float, refused: bool
) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    factors = adapter.matrices[name]
    large = replace(factors, **{side: np.full_like(getattr(factors, side), scale) for side in SCALES})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if refused:
            with pytest.raises(AdapterTensorError, match=r"down_proj.*too large for bfloat16 or no number"):
                merge.merge(tiny, BASE, replace(adapter, matrices={name: large}), tmp_path)
        else:
            merge.merge(tiny, BASE, replace(adapter, matrices={name: large}), tmp_path)
            assert base_weights(tmp_path)[name.replace(".2.", ".1.")].abs().max() > 1e30


@pytest.mark.parametrize("sign", [1, -1])
def test_value_that_rounds_to_infinity_is_refused_and_the_one_below_is_not(
    tiny: Path, adapter: Adapter, tmp_path: Path, sign: int
) -> None:
    # Halfway from the largest bfloat16 to 2¹²⁸; a tie goes to the even neighbour, which is infinity.
    halfway = np.float32(sign * float.fromhex("0x1.ffp127"))
    below = np.nextafter(halfway, np.float32(0))

    def merge_with(value: np.float32) -> None:
        values = {"model.norm.weight": np.full(64, value, dtype=np.float32)}
        merge.merge(tiny, BASE, replace(adapter, values=values), tmp_path)

    merge_with(below)
    assert base_weights(tmp_path)["model.norm.weight"].isfinite().all()
    with pytest.raises(AdapterTensorError, match="too large for bfloat16"):
        merge_with(halfway)


@pytest.fixture
def shipped(
    adapter: Adapter, merged: Path, tiny: Path, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The adapter's file, shipped as that of a model of the catalogue whose digests are those of `merged`."""
    path = tmp_path / "adapters" / f"{HEALED}.safetensors"
    path.parent.mkdir()
    adapter_file.write(path, adapter)
    digests = {name: record.sha256 for name, record in manifest.take("", merged).files.items()}
    entry = replace(
        CATALOGUE[BASE],
        name=HEALED,
        recipe=HealedRecipe(BASE, path.name, manifest.sha256_of(path)),
        sha256=MappingProxyType({**digests, "LICENSE": CATALOGUE[BASE].sha256["LICENSE"]}),
    )
    monkeypatch.setattr(catalogue, "CATALOGUE", MappingProxyType({**CATALOGUE, HEALED: entry}))
    monkeypatch.setattr(merge, "ADAPTERS", path.parent)
    return path


@pytest.fixture
def own_root(tiny: Path, tmp_path: Path) -> Path:
    """A root of this test alone that already has the base, as a link."""
    root = tmp_path / "models"
    root.mkdir()
    (root / BASE).symlink_to(tiny)
    return root


def test_healed_model_is_prepared_verified_and_rebuilt(shipped: Path, merged: Path, own_root: Path) -> None:
    folder = prepare(HEALED, own_root)
    assert (folder / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()
    assert {path.name for path in folder.iterdir()} == {*catalogue.entry_of(HEALED).sha256, "manifest.json"}
    (folder / "config.json").write_text("{}")
    with pytest.raises(DigestMismatchError, match="--rebuild"):
        prepare(HEALED, own_root, verify=True)
    prepare(HEALED, own_root, rebuild=True)
    prepare(HEALED, own_root, verify=True)


def test_commands_know_a_healed_model(shipped: Path, own_root: Path) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--root", str(own_root)], env={"COLUMNS": "200"})

    def listed() -> str:
        return next(line for line in run("list").stdout.splitlines() if HEALED in line)

    assert " no " in listed()
    assert run("prepare", HEALED).stdout == f"{own_root / HEALED}\n"
    assert " yes " in listed()
    assert run("prepare", HEALED, "--verify").exit_code == 0
    shipped.write_bytes(b"")
    refused = run("prepare", HEALED, "--rebuild")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].startswith(f"crossfill: {shipped}: expected sha256 ")
    # A model that is there needs its adapter no more.
    assert run("prepare", HEALED, "--verify").exit_code == 0


@pytest.mark.parametrize("missing", [False, True], ids=["flipped", "missing"])
def test_adapter_with_other_bytes_is_refused_before_the_base_is_made(
    shipped: Path, tmp_path: Path, missing: bool
) -> None:
    data = shipped.read_bytes()
    shipped.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if missing:
        shipped.unlink()
    empty = tmp_path / "empty"
    with pytest.raises(DigestMismatchError, match="install Crossfill again") as caught:
        prepare(HEALED, empty)
    assert caught.value.path == shipped
    assert [path.name for path in empty.iterdir() if path.is_dir()] == []


def test_missing_numpy_is_said_and_leaves_nothing(
    shipped: Path, own_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingDependencyError, match="numpy is needed to merge an adapter"):
        prepare(HEALED, own_root)
    assert [path.name for path in own_root.iterdir() if path.is_dir()] == [BASE]


def test_every_shipped_adapter_belongs_to_a_model_of_the_catalogue() -> None:
    recipes = [entry.recipe for entry in CATALOGUE.values()]
    named = {recipe.adapter for recipe in recipes if isinstance(recipe, HealedRecipe)}
    assert {path.name for path in merge.ADAPTERS.glob("*.safetensors")} == named
