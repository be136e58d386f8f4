from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines.models.convert import pairs_to_halves
from engines.models.safetensors_file import bf16_tensor, read, to_bf16_bytes, write

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


def test_pairs_to_halves_moves_even_rows_first_in_each_head() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert pairs_to_halves(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
