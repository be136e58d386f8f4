import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from crossfill_kernels.native import library
from crossfill_kernels.rows import Rows, rows_at
from crossfill_kernels.slots import Slots, as_slots

# Set by the test that runs the others against the sanitized build.
NATIVE_FOLDER = Path(os.environ.get("CROSSFILL_TEST_NATIVE_FOLDER", library.BUILD_FOLDER))


@pytest.fixture(scope="session", autouse=True)
def chosen_build() -> Iterator[None]:
    """Tests that name no variant run on the best one of the build under test, too."""
    if NATIVE_FOLDER == library.BUILD_FOLDER:
        yield
    else:
        with library.replaced(library.runnable_variants()[0], NATIVE_FOLDER):
            yield


@pytest.fixture(params=library.runnable_variants())
def native_variant(request) -> Iterator[str]:
    """Each variant of the C++ library that this processor runs serves the CPU kernels in turn."""
    with library.replaced(request.param, NATIVE_FOLDER):
        yield request.param


@dataclass(frozen=True)
class AttentionCase:
    """Random inputs of an attention op."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: Slots
    rows: Rows

    def empty_out(self) -> torch.Tensor:
        return torch.full_like(self.query, float("nan"))

    def to(self, device) -> "AttentionCase":
        slots = self.slots if isinstance(self.slots, slice) else self.slots.to(device)
        tensors = (tensor.to(device) for tensor in (self.query, self.keys, self.values))
        return AttentionCase(*tensors, slots, self.rows.to(device))


@pytest.fixture(scope="session")
def attention_case() -> Callable[..., AttentionCase]:
    """Make inputs: rows at `positions` of a context whose cache rows lie together or scattered among others."""

    def make(positions, context, heads=6, kv_heads=2, dim=64, dtype=torch.float32, scattered=False, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rows = rows_at(positions if isinstance(positions, range) else torch.tensor(positions, dtype=torch.int64))
        capacity = context + 37
        keys = torch.randn(capacity, kv_heads, dim, generator=generator).to(dtype)
        values = torch.randn(capacity, kv_heads, dim, generator=generator).to(dtype)
        query = torch.randn(rows.count, heads, dim, generator=generator).to(dtype)
        indices = torch.randperm(capacity, generator=generator)[:context] if scattered else torch.arange(5, 5 + context)
        return AttentionCase(query, keys, values, as_slots(indices), rows)

    return make


@pytest.fixture(scope="session")
def drawn_case(attention_case) -> Callable[..., AttentionCase]:
    """Let hypothesis draw the inputs: any rows of a context of up to `longest` tokens, any heads, odd dimensions."""

    def draw(data, longest):
        context = data.draw(st.integers(1, longest))
        kv_heads, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 3]))
        return attention_case(
            sorted(data.draw(st.sets(st.integers(0, context - 1), max_size=90))),
            context,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            dim=data.draw(st.sampled_from([1, 7, 32, 64, 80, 128])),
            scattered=data.draw(st.booleans()),
            seed=data.draw(st.integers(0, 2**20)),
        )

    return draw


@pytest.fixture(scope="session")
def triton_device():
    """Where Triton kernels run: the GPU, or this process, which then interprets them."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    from crossfill_kernels.interpretation import interpret_kernels

    interpret_kernels()
    return torch.device("cpu")
