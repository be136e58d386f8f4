from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines.models.convert import pairs_to_halves
from engines.models.safetensors_file import bf16_tensor, read, read_metadata, to_bf16_bytes, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "values",
    [
        np.random.RandomState(0).standard_normal(4097).astype(np.float32) * 100,
        # Ties between two neighbours, signs, zeros, the smallest numbers, and rounding up into the next power of two.
        np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, 1e-45, 1e-38, 1.9999999], dtype=np.float32),
        np.array([], dtype=np.float32),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
    ],
    ids=["random", "edges", "empty", "transposed"],
)
def test_rounding_equals_that_of_torch(values: np.ndarray) -> None:
    expected = torch.from_numpy(values).to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
    assert to_bf16_bytes(values) == expected


def test_file_is_read_by_the_library_and_by_us(tmp_path: Path) -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.full(5, 0.5, dtype=np.float32)
    steps: list[tuple[int, int]] = []
    write(
        tmp_path / "x.safetensors",
        [bf16_tensor("b", (2, 3), lambda: first), bf16_tensor("a", (5,), lambda: second)],
        lambda done, total: steps.append((done, total)),
    )
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded["b"].dtype == torch.bfloat16
    assert torch.equal(loaded["b"].float(), torch.from_numpy(first))
    assert [tensor.name for tensor in read(tmp_path / "x.safetensors")] == ["b", "a"]
    assert read(tmp_path / "x.safetensors")[1].read() == to_bf16_bytes(second)
    assert steps == [(1, 2), (2, 2)]


def write_raw(path: Path, header: str, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


def entry(begin: int, end: int, **changes: object) -> dict[str, Any]:
    return {"dtype": "I8", "shape": [end - begin], "data_offsets": [begin, end], **changes}


def test_tensors_come_in_file_order_and_may_be_empty(tmp_path: Path) -> None:
    header = {"c": entry(2, 4), "b": entry(0, 2), "a": entry(2, 2, shape=[5, 0]), "d": entry(4, 6, dtype="U16")}
    write_raw(tmp_path / "x", json.dumps(header), b"abcdef")
    assert [(tensor.name, tensor.read()) for tensor in read(tmp_path / "x")] == [
        ("b", b"ab"),
        ("a", b""),
        ("c", b"cd"),
        ("d", b"ef"),
    ]


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"a": entry(-4, 0, shape=[4])}, "cannot have"),
        ({"a": entry(0, 4, shape=[-1, -4])}, "cannot have"),
        ({"a": entry(0, 4, shape=[True, 4])}, "cannot have"),
        ({"a": entry(0, 4, shape=[1] * 65)}, "cannot have"),
        ({"a": entry(0, 4, data_offsets=[0.0, 4.0])}, "cannot have"),
        ({"a": entry(0, 4, data_offsets=[0, 2, 4])}, "cannot have"),
        ({"a": entry(0, 4, dtype=["I8"])}, "cannot have"),
        ({"a": entry(0, 4, shape=[5])}, "cannot lie"),
        ({"a": entry(0, 4, dtype="F32")}, "cannot lie"),
        ({"a": entry(4, 0, dtype="U8", shape=[4])}, "cannot lie"),
        ({"a": entry(0, 3), "b": entry(2, 4)}, "'b' begins at byte 2, where 3 was expected"),
        ({"a": entry(0, 2), "b": entry(3, 4)}, "'b' begins at byte 3, where 2 was expected"),
        ({"a": entry(0, 3)}, "end at byte"),
        ({"a": entry(0, 5)}, "end at byte"),
    ],
    ids=[
        "negative-offset",
        "negative-shape",
        "true",
        "dimensions",
        "float-offset",
        "three-offsets",
        "list-dtype",
        "long-shape",
        "wide-type",
        "backwards",
        "overlap",
        "gap",
        "trailing",
        "beyond",
    ],
)
def test_tensor_outside_its_own_bytes_is_refused(tmp_path: Path, header: dict[str, Any], text: str) -> None:
    write_raw(tmp_path / "x", json.dumps({"a": entry(0, 4)}), b"abcd")
    assert read(tmp_path / "x")[0].read() == b"abcd"
    write_raw(tmp_path / "x", json.dumps(header), b"abcd")
    with pytest.raises(ValueError, match=text):
        read(tmp_path / "x")


def test_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry(0, 4))
    write_raw(tmp_path / "x", f'{{"a": {one}, "a": {one}}}', b"abcd")
    for reader in (read, read_metadata):
        with pytest.raises(ValueError, match="twice"):
            reader(tmp_path / "x")


@pytest.mark.parametrize(
    "content", [b"", b"\2", b"\2\0\0\0\0\0\0\0{", b"\xff" * 100], ids=["empty", "short", "cut", "huge"]
)
def test_file_shorter_than_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="no safetensors header"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    ("header", "text"),
    [("[" * 100_000, "nested too deeply"), ("[]", "not a JSON object"), ('{"__metadata__": {"a": 1}}', "strings")],
    ids=["deep", "list", "number"],
)
def test_metadata_that_is_not_strings_is_refused(tmp_path: Path, header: str, text: str) -> None:
    write_raw(tmp_path / "x", '{"__metadata__": {"a": "1"}}', b"")
    assert read_metadata(tmp_path / "x") == {"a": "1"}
    write_raw(tmp_path / "x", header, b"")
    with pytest.raises(ValueError, match=text):
        read_metadata(tmp_path / "x")


def test_pairs_to_halves_moves_even_rows_first_in_each_head() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert pairs_to_halves(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
