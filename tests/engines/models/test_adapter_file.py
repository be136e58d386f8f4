from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engines.models import safetensors_file
from engines.models.adapter_file import MAX_RANK, Adapter, Factors, quantise, read, write
from engines.models.errors import AdapterError, AdapterFileError, AdapterTensorError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MATRIX = "model.layers.2.mlp.down_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"


def random_factors(rows: int = 12, rank: int = 5, columns: int = 20, seed: int = 0) -> Factors:
    rng = np.random.default_rng(seed)
    return Factors(
        up=rng.integers(-128, 128, (rows, rank), dtype=np.int8),
        down=rng.integers(-128, 128, (rank, columns), dtype=np.int8),
        row_scale=rng.uniform(0.001, 0.1, rows).astype(np.float32),
        column_scale=rng.uniform(0.001, 0.1, columns).astype(np.float32),
    )


def an_adapter(**changes: object) -> Adapter:
    fields: dict[str, object] = {
        "base": "tiny-llama",
        "base_sha256": "ab" * 32,
        "dropped_layers": (1, 3),
        "matrices": {MATRIX: random_factors(), "model.embed_tokens.weight": random_factors(rank=2, seed=1)},
        # Exact in bfloat16.
        "values": {NORM: np.array([1.0, -0.5, 3.0], dtype=np.float32)},
        "provenance": '{"steps": 7}',
    }
    return Adapter(**{**fields, **changes})  # type: ignore[arg-type]


def relative_error(factors: Factors, exact: np.ndarray) -> float:
    return float(np.linalg.norm(factors.delta() - exact) / np.linalg.norm(exact))


def test_adapter_comes_back_as_it_was_written(tmp_path: Path) -> None:
    adapter = an_adapter()
    write(tmp_path / "a", adapter)
    again = read(tmp_path / "a")
    for name in ("base", "base_sha256", "dropped_layers", "provenance"):
        assert getattr(again, name) == getattr(adapter, name)
    assert set(again.matrices) == set(adapter.matrices)
    for name, factors in adapter.matrices.items():
        for part in ("up", "down", "row_scale", "column_scale"):
            before, after = getattr(factors, part), getattr(again.matrices[name], part)
            assert (after.dtype, after.tobytes()) == (before.dtype, before.tobytes())
    assert {name: value.tolist() for name, value in again.values.items()} == {NORM: [1.0, -0.5, 3.0]}


def test_same_adapter_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    adapter = an_adapter()
    turned = replace(adapter, matrices=dict(reversed(adapter.matrices.items())), dropped_layers=(3, 1))
    for name, value in {"a": adapter, "b": turned, "c": replace(adapter, dropped_layers=(1, 4))}.items():
        write(tmp_path / name, value)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    adapter = an_adapter()
    write(tmp_path / "a", adapter)
    loaded = load_file(tmp_path / "a")
    factors = adapter.matrices[MATRIX]
    assert torch.equal(loaded[f"{MATRIX}.up"], torch.from_numpy(factors.up))
    assert torch.equal(loaded[f"{MATRIX}.column_scale"], torch.from_numpy(factors.column_scale))
    assert loaded[f"{NORM}.value"].dtype == torch.bfloat16
    with safe_open(tmp_path / "a", "pt") as opened:
        assert opened.metadata()["dropped_layers"] == "[1, 3]"


def test_delta_has_the_same_bytes_in_any_order_of_summation() -> None:
    factors = random_factors(40, 300, 50)
    order = np.random.default_rng(1).permutation(300)
    turned = replace(factors, up=factors.up[:, order], down=np.ascontiguousarray(factors.down[order]))
    assert factors.delta().tobytes() == turned.delta().tobytes()
    # The control: of factors that are not integers, the order shows.
    up, down = factors.up * np.float32(0.1), factors.down * np.float32(0.1)
    assert (up @ down).tobytes() != (up[:, order] @ down[order]).tobytes()


def test_delta_equals_integer_arithmetic_in_torch() -> None:
    factors = random_factors(40, MAX_RANK, 50)
    product = torch.from_numpy(factors.up).long() @ torch.from_numpy(factors.down).long()
    rows, columns = torch.from_numpy(factors.row_scale), torch.from_numpy(factors.column_scale)
    expected = rows[:, None] * product.float() * columns[None, :]
    assert torch.equal(torch.from_numpy(factors.delta()), expected)


def test_the_highest_rank_is_the_last_whose_products_are_all_exact() -> None:
    def product(rank: int) -> tuple[float, int]:
        # The largest products, and one of 1, which is the first to be lost.
        row = np.full((1, rank), -128, dtype=np.int8)
        row[0, -1] = 1
        ones = np.ones(1, dtype=np.float32)
        delta = Factors(row, np.ascontiguousarray(row.T), ones, ones).delta()
        return float(delta[0, 0]), (rank - 1) * 128**2 + 1

    exact, above = product(MAX_RANK), product(MAX_RANK + 1)
    assert exact[0] == exact[1]
    assert above[0] != above[1]
    one = random_factors(1, MAX_RANK + 1, 1)
    with pytest.raises(AdapterTensorError, match=r"rank 1025 is above 1024.*smaller rank"):
        an_adapter(matrices={MATRIX: one})


@pytest.mark.parametrize("rank", [2, 8, 32, 100])
@pytest.mark.parametrize("decay", [0.0, 0.3, 2.0])
def test_eight_bits_cost_less_than_one_percent(rank: int, decay: float) -> None:
    rng = np.random.default_rng(rank)
    left, _ = np.linalg.qr(rng.standard_normal((192, rank)))
    right, _ = np.linalg.qr(rng.standard_normal((256, rank)))
    up, down = left * np.exp(-decay * np.arange(rank)), right.T
    error = relative_error(quantise(up.astype(np.float32), down.astype(np.float32)), up @ down)
    assert error < 0.01


def test_any_factors_of_one_product_are_as_good_as_the_best() -> None:
    rng = np.random.default_rng(0)
    good_up, good_down = rng.standard_normal((192, 32)), rng.standard_normal((32, 256))
    mix = rng.standard_normal((32, 32)) * np.geomspace(1, 1e-3, 32)
    up, down = good_up @ mix, np.linalg.solve(mix, good_down)
    exact = good_up @ good_down
    assert relative_error(quantise(up.astype(np.float32), down.astype(np.float32)), exact) < 0.01
    # The control: scales alone do not save these factors.
    rows, columns = np.abs(up).max(axis=1) / 127, np.abs(down).max(axis=0) / 127
    plain = (rows[:, None] * np.rint(up / rows[:, None])) @ (np.rint(down / columns) * columns)
    assert np.linalg.norm(plain - exact) / np.linalg.norm(exact) > 0.03


def test_quantised_zero_is_zero_and_fits_an_adapter(tmp_path: Path) -> None:
    factors = quantise(np.zeros((6, 4), dtype=np.float32), np.ones((4, 8), dtype=np.float32))
    write(tmp_path / "a", an_adapter(matrices={MATRIX: factors}))
    delta = read(tmp_path / "a").matrices[MATRIX].delta()
    assert delta.shape == (6, 8)
    assert not delta.any()


def test_rank_above_the_matrix_is_cut_to_it() -> None:
    rng = np.random.default_rng(0)
    up, down = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 40), (40, 9)))
    factors = quantise(up, down)
    assert (factors.rank, factors.shape) == (6, (6, 9))
    assert relative_error(factors, up @ down) < 0.01


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dropped_layers": (2,)}, "layer 2 is dropped"),
        ({"matrices": {}, "dropped_layers": (2,)}, "layer 2 is dropped"),
        ({"matrices": {NORM: random_factors()}}, "both corrected and replaced"),
        ({"values": {NORM: np.array([np.inf], dtype=np.float32)}}, "float32 and finite"),
        ({"values": {NORM: np.ones(3)}}, "float32 and finite"),
    ],
    ids=["matrix-of-dropped", "value-of-dropped", "both", "infinite", "float64"],
)
def test_contradictory_adapter_is_refused(change: dict[str, object], text: str) -> None:
    an_adapter()
    with pytest.raises(AdapterTensorError, match=text) as caught:
        an_adapter(**change)
    assert caught.value.name in {MATRIX, NORM}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"down": np.zeros((4, 20), dtype=np.int8)}, "do not fit each other"),
        ({"row_scale": np.ones(13, dtype=np.float32)}, "do not fit each other"),
        ({"column_scale": np.ones(1, dtype=np.float32)}, "do not fit each other"),
        ({"up": np.zeros((12, 5), dtype=np.float32)}, "needs int8"),
        ({"row_scale": np.ones(12)}, "needs int8 matrices and float32"),
        ({"row_scale": np.full(12, np.nan, dtype=np.float32)}, "not finite"),
    ],
    ids=["rank", "rows", "columns", "float-factor", "double-scale", "nan"],
)
def test_factors_that_do_not_fit_are_refused(change: dict[str, np.ndarray], text: str) -> None:
    with pytest.raises(AdapterTensorError, match=text):
        an_adapter(matrices={MATRIX: replace(random_factors(), **change)})


@pytest.mark.parametrize(
    "layers",
    [("a", 1), ([1],), (True,), (2.0,), "34", (-1,), (1, 1)],
    ids=["text", "list", "true", "float", "digits", "negative", "twice"],
)
def test_dropped_layers_that_are_not_different_numbers_are_refused(layers: tuple[object, ...]) -> None:
    assert an_adapter(dropped_layers=(1,)).dropped_layers == (1,)
    with pytest.raises(AdapterError, match=r"dropped layers must be whole numbers from 0|drops each layer once"):
        an_adapter(dropped_layers=layers)


@pytest.mark.parametrize(
    "change",
    [
        {"base": 7},
        {"base_sha256": None},
        {"matrices": {7: random_factors()}},
        {"values": {b"norm": np.ones(3, dtype=np.float32)}},
        {"base": "two\nlines"},
    ],
    ids=["base", "digest", "matrix", "value", "unprintable"],
)
def test_names_and_digests_that_are_not_printable_text_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(AdapterError, match="must be printable text"):
        an_adapter(**change)


def test_provenance_must_be_json() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        an_adapter(provenance="by hand")


def rewritten(path: Path, keep: Callable[[str], bool], **metadata: str) -> None:
    """Write the adapter of `path` again without some tensors, with other metadata."""
    before = path.with_suffix(".before")
    path.rename(before)
    tensors = [tensor for tensor in safetensors_file.read(before) if keep(tensor.name)]
    known = {**safetensors_file.read_metadata(before), **metadata}
    safetensors_file.write(path, tensors, lambda _done, _total: None, metadata=known)


def test_file_of_another_format_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", an_adapter())
    rewritten(tmp_path / "a", lambda _name: True)
    read(tmp_path / "a")
    rewritten(tmp_path / "a", lambda _name: True, adapter_format="2")
    with pytest.raises(AdapterFileError, match="has adapter format '2', this version reads 1"):
        read(tmp_path / "a")


def test_file_without_one_of_the_four_parts_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", an_adapter())
    rewritten(tmp_path / "a", lambda name: name != f"{MATRIX}.down")
    with pytest.raises(AdapterFileError, match="down"):
        read(tmp_path / "a")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"GGUF" * 100,
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data.replace(b".down_proj.weight.up", b".down_proj.weight.xx"),
        lambda data: data.replace(b'"I8"', b'"U8"'),
        lambda data: data.replace(b'"base_sha256"', b'"base_sha257"'),
    ],
    ids=["other-kind", "empty", "header-cut", "data-cut", "part", "type", "metadata"],
)
def test_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a"
    write(path, an_adapter())
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    with pytest.raises(AdapterFileError, match="not an adapter that this version can read"):
        read(path)


@pytest.mark.parametrize(
    "layers",
    ['["a", 1]', "[[1]]", "[true]", "[2.0]", '"34"', "{}", "[-1]", "[1, 1]", "1", "null", "", "[" * 100_000],
)
def test_file_with_other_dropped_layers_than_numbers_is_refused(tmp_path: Path, layers: str) -> None:
    write(tmp_path / "a", an_adapter())
    rewritten(tmp_path / "a", lambda _name: True, dropped_layers="[4, 0]")
    assert read(tmp_path / "a").dropped_layers == (4, 0)
    rewritten(tmp_path / "a", lambda _name: True, dropped_layers=layers)
    with pytest.raises(AdapterFileError) as caught:
        read(tmp_path / "a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"adapter_format": "1\n2"},
        {"base": "two\nlines"},
        {"provenance": "[" * 100_000},
        {"provenance": "by hand"},
    ],
    ids=["version", "base", "deep-provenance", "no-provenance"],
)
def test_file_with_unusable_metadata_is_refused_in_one_line(tmp_path: Path, change: dict[str, str]) -> None:
    write(tmp_path / "a", an_adapter())
    rewritten(tmp_path / "a", lambda _name: True, **change)
    with pytest.raises(AdapterFileError) as caught:
        read(tmp_path / "a")
    assert "\n" not in str(caught.value)


def with_header(whole: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file `whole` with what `change` makes of its header (in place where it returns None), data as before."""
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    changed = change(header)
    encoded = changed if isinstance(changed, bytes) else json.dumps(header if changed is None else changed).encode()
    return len(encoded).to_bytes(8, "little") + encoded + whole[8 + size :]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: b'{"a":' * 100_000,
        lambda header: [],
        lambda header: json.dumps(header).encode().replace(b"{", b'{"__metadata__":{},', 1),
        lambda header: header[f"{MATRIX}.up"].update(data_offsets=[-60, 0]),
        lambda header: header[f"{MATRIX}.up"].update(shape=[-12, -5]),
        lambda header: header[f"{MATRIX}.up"].update(shape=[0, 10**30]),
        lambda header: header[f"{MATRIX}.up"].update(shape=7),
        lambda header: header[f"{MATRIX}.up"].pop("shape"),
        lambda header: header.update({f"{MATRIX}.up": 7}),
        lambda header: header.update(__metadata__=7),
        lambda header: header["__metadata__"].update(provenance={}),
        lambda header: header.update({"two\nlines.value": header.pop(f"{NORM}.value")}),
        lambda header: header[f"{MATRIX}.up"].update(dtype="two\nlines"),
    ],
    ids=[
        "deep",
        "list",
        "twice",
        "negative-offset",
        "negative-shape",
        "huge-shape",
        "no-shape",
        "shape-gone",
        "number",
        "metadata",
        "metadata-value",
        "name",
        "dtype",
    ],
)
def test_hostile_header_is_refused_in_one_line(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = tmp_path / "a"
    write(path, an_adapter())
    whole = path.read_bytes()
    # The control: a header that is only written anew.
    path.write_bytes(with_header(whole, lambda _header: None))
    assert read(path).base == "tiny-llama"
    path.write_bytes(with_header(whole, change))
    with pytest.raises(AdapterFileError, match="not an adapter that this version can read") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_missing_numpy_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", an_adapter())
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingDependencyError, match=r"numpy is needed to merge an adapter .*pip install"):
        read(tmp_path / "a")
