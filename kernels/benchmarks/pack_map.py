"""Packing a map against torch's products of the same queries and keys, paired, one thread. Run: make bench."""

import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from masks import striped_index
from paired import median_ratio, paired_seconds, setting

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockIndex, MapStorage
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import rows_at

HEADS, KV_HEADS, DIM, ROUNDS = 9, 3, 64, 7
STORAGES = (torch.float32, torch.bfloat16, torch.uint8)
# (tokens, density of a head).
CASES = ((2048, 0.20), (4096, 0.10), (4096, 0.20))


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"pack_map: {HEADS}/{KV_HEADS} heads, d {DIM}; {setting()}; median of {ROUNDS} paired rounds")
    for column in ("tokens", "density", "blocks", "stored", "pack_map", "torch's products", "pack_map / products"):
        table.add_column(column, justify="right")
    cases = [(*case, dtype) for case in CASES for dtype in STORAGES]
    for length, density, dtype in track(cases, description="pack_map"):
        index = striped_index(HEADS, length // 64, density)
        taken = _measure(length, index, dtype)
        table.add_row(
            str(length),
            f"{density:.2f}",
            str(index.columns.numel()),
            str(dtype).removeprefix("torch."),
            *(f"{statistics.median(seconds) * 1e3:.1f} ms" for seconds in taken.values()),
            f"{median_ratio(taken['ours'], taken['products']):.2f}",
        )
    Console().print(table)


def _measure(length: int, index: BlockIndex, dtype: torch.dtype) -> dict[str, list[float]]:
    """Seconds of `ours` and of torch's `products`, round by round."""
    torch.manual_seed(0)
    kept, rows = index.columns.numel(), rows_at(range(length))
    query, keys = torch.randn(length, HEADS, DIM), torch.randn(length, KV_HEADS, DIM)
    scales = torch.zeros(kept, 64) if dtype == torch.uint8 else None
    storage, slot_ids = MapStorage(torch.zeros(kept, 64, 64, dtype=dtype), scales), torch.randperm(kept).int()
    # The same blocks, gathered beforehand: what the scores alone cost torch.
    entry = torch.repeat_interleave(torch.arange(HEADS * rows.block_count), index.offsets.diff().long())
    head, row = entry // rows.block_count, entry % rows.block_count
    queries = query.view(-1, 64, HEADS, DIM)[row, :, head]  # [m, 64, d]
    transposed = keys.view(-1, 64, KV_HEADS, DIM)[index.columns.long(), :, head // (HEADS // KV_HEADS)].transpose(1, 2)
    transposed, scores = transposed.contiguous(), torch.empty(kept, 64, 64)

    def ours() -> None:
        pack_map(query, keys, slice(0, length), rows, index, scale=DIM**-0.5, storage=storage, slot_ids=slot_ids)

    ours()
    _check_sums(storage, length)
    products = partial(torch.bmm, queries, transposed, out=scores)
    return paired_seconds({"ours": ours, "products": products}, ROUNDS)


def _check_sums(storage: MapStorage, length: int) -> None:
    """Every row of every head sums to 1, so that all of them together sum to their number."""
    tiles = storage.blocks.float()
    tiles = tiles if storage.scales is None else tiles * storage.scales[..., None]
    torch.testing.assert_close(tiles.double().sum(), torch.tensor(float(HEADS * length)).double(), atol=0, rtol=5e-3)


if __name__ == "__main__":
    assert dispatch.library.load() is not None, "build the library first: python -m crossfill_kernels.native.build"
    main()
