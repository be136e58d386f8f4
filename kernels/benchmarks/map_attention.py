"""Attention by mixed maps against torch's causal SDPA of the same heads, paired, one thread. Run: make bench."""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from masks import striped_index, union_density

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import MapStorage, PackedMap
from crossfill_kernels.map_attention import Form, map_attention, map_attention_reference
from crossfill_kernels.map_attention.arguments import packed_rows
from crossfill_kernels.map_attention.cost import choose_form, count_work
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import Rows, rows_at

SENDERS, RECEIVERS, KV_HEADS, DIM, LENGTH, ROUNDS = 9, 9, 3, 64, 4096, 5
STORAGES = (torch.float32, torch.bfloat16, torch.uint8)
TIMED: tuple[Form, ...] = ("auto", "paper", "mix", "values_first", "sparse")
# (density of a head, how much heads share, sender heads that a receiver head mixes, storage).
CASES = (
    *((0.10, 1.0, 9, dtype) for dtype in STORAGES),
    (0.10, 2.0, 9, torch.float32),
    *((0.10, 1.0, 2, dtype) for dtype in STORAGES),
    (0.20, 1.0, 9, torch.uint8),
    (0.20, 1.0, 2, torch.uint8),
)


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(
        title=f"CPU, one thread, {SENDERS} to {RECEIVERS}/{KV_HEADS} heads, d {DIM}, {LENGTH} tokens: "
        f"time of causal SDPA / ours, median of {ROUNDS} paired rounds"
    )
    for column in ("density", "union", "mixed heads", "stored", "SDPA", *TIMED, "auto takes"):
        table.add_column(column, justify="right")
    for density, shared, mixed, dtype in track(CASES, description="map_attention"):
        table.add_row(*_row(density, shared, mixed, dtype))
    Console(width=150).print(table)


def _row(density: float, shared: float, mixed: int, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(0)
    rows, slots = rows_at(range(LENGTH)), slice(0, LENGTH)
    packed, union = _map(density, shared, dtype, rows)
    weights = _weights(mixed)
    queries = torch.randn(LENGTH, RECEIVERS, DIM)
    keys, values = torch.randn(2, LENGTH, KV_HEADS, DIM).unbind()
    q, k, v = (t.transpose(0, 1)[None] for t in (queries, keys, values))
    out = torch.full_like(queries, float("nan"))

    def dense() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def ours(form: Form) -> None:
        map_attention(packed, weights, values, slots, rows, out=out, form=form)

    newest = rows_at(range(LENGTH - 64, LENGTH))
    want = map_attention_reference(packed, weights, values, slots, newest)
    for form in TIMED:
        ours(form)
        torch.testing.assert_close(out[-64:], want, atol=1e-5, rtol=1e-5)
    rounds = [(_seconds(dense), [_seconds(partial(ours, form)) for form in TIMED]) for _ in range(ROUNDS)]
    dense_s = statistics.median(whole for whole, _ in rounds)
    ratios = [statistics.median(whole / parts[i] for whole, parts in rounds) for i in range(len(TIMED))]
    chosen = choose_form(count_work(packed, packed_rows(packed, rows), weights, KV_HEADS, DIM))
    figures = [f"{dense_s * 1e3:.0f} ms", *(f"{ratio:.1f}×" for ratio in ratios)]
    return [f"{density:.2f}", f"{union:.2f}", str(mixed), str(dtype).removeprefix("torch."), *figures, chosen]


def _map(density: float, shared: float, dtype: torch.dtype, rows: Rows) -> tuple[PackedMap, float]:
    index = striped_index(SENDERS, rows.block_count, density, shared=shared)
    kept = int(index.offsets[-1])
    scales = torch.zeros(kept, 64) if dtype == torch.uint8 else None
    storage = MapStorage(torch.zeros(kept, 64, 64, dtype=dtype), scales)
    query, keys = torch.randn(LENGTH, SENDERS, DIM), torch.randn(LENGTH, KV_HEADS, DIM)
    slot_ids = torch.randperm(kept).int()
    packed = pack_map(query, keys, slice(0, LENGTH), rows, index, scale=DIM**-0.5, storage=storage, slot_ids=slot_ids)
    return packed, union_density(index)


def _weights(mixed: int) -> torch.Tensor:
    """Weights [H_S, H_R] that sum to 1, with `mixed` sender heads of a receiver head."""
    kept = torch.rand(SENDERS, RECEIVERS).argsort(dim=0) < mixed
    return torch.softmax(torch.randn(SENDERS, RECEIVERS).masked_fill(~kept, float("-inf")), dim=0)


def _seconds(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    assert dispatch.library.load() is not None, "build the library first: python -m crossfill_kernels.native.build"
    main()
