"""Attention by mixed maps against torch's causal SDPA of the same heads, paired, one thread. Run: make bench.

With --model FOLDER, the maps are those of a real model on a real text.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from masks import striped_index, union_density
from paired import causal_sdpa, median_ratio, paired_seconds, setting

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockIndex, MapStorage, PackedMap
from crossfill_kernels.map_attention import Form, map_attention, map_attention_reference
from crossfill_kernels.map_attention.arguments import packed_rows
from crossfill_kernels.map_attention.cost import choose_form, count_work
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import rows_at
from crossfill_kernels.select_blocks import select_blocks

if TYPE_CHECKING:
    from real_masks import Captured

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's folder: time its own maps instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model is not None:
        _real_maps(options.model)
        return
    table = Table(
        title=f"map_attention: time of causal SDPA / ours; {SENDERS} to {RECEIVERS}/{KV_HEADS} heads, d {DIM}, "
        f"{LENGTH} tokens; {setting()}; median of {ROUNDS} paired rounds"
    )
    for column in ("density", "union", "mixed heads", "stored", "SDPA", *TIMED, "auto takes"):
        table.add_column(column, justify="right")
    for density, shared, mixed, dtype in track(CASES, description="map_attention"):
        torch.manual_seed(0)
        index = striped_index(SENDERS, LENGTH // 64, density, shared=shared)
        query, keys = torch.randn(LENGTH, SENDERS, DIM), torch.randn(LENGTH, KV_HEADS, DIM)
        packed = _packed(query, keys, index, dtype)
        times = _times(packed, _weights(mixed), torch.randn(LENGTH, KV_HEADS, DIM), TIMED)
        stored = str(dtype).removeprefix("torch.")
        table.add_row(f"{density:.2f}", f"{union_density(index):.2f}", str(mixed), stored, *_figures(times))
    Console(width=150).print(table)


class Times:
    """Seconds by name, round by round, and the form that `auto` takes."""

    def __init__(self, taken: dict[str, list[float]], chosen: str) -> None:
        self.taken, self.chosen = taken, chosen


def _times(packed: PackedMap, weights: torch.Tensor, values: torch.Tensor, forms: tuple[Form, ...]) -> Times:
    length = values.shape[0]
    rows, slots = rows_at(range(length)), slice(0, length)
    query, out = torch.randn(length, RECEIVERS, DIM), torch.full((length, RECEIVERS, DIM), float("nan"))

    def ours(form: Form) -> None:
        map_attention(packed, weights, values, slots, rows, out=out, form=form)

    newest = rows_at(range(length - 64, length))
    want = map_attention_reference(packed, weights, values, slots, newest)
    for form in forms:
        ours(form)
        torch.testing.assert_close(out[-64:], want, atol=1e-5, rtol=1e-5)
    functions = {"SDPA": causal_sdpa(query, torch.randn_like(values), values)}
    taken = paired_seconds(functions | {form: partial(ours, form) for form in forms}, ROUNDS)
    work = count_work(packed, packed_rows(packed, rows), weights, KV_HEADS, DIM)
    return Times(taken, choose_form(work))


def _figures(times: Times) -> list[str]:
    dense = times.taken["SDPA"]
    ratios = [f"{median_ratio(dense, seconds):.1f}×" for name, seconds in times.taken.items() if name != "SDPA"]
    return [f"{statistics.median(dense) * 1e3:.0f} ms", *ratios, times.chosen]


def _packed(query: torch.Tensor, keys: torch.Tensor, index: BlockIndex, dtype: torch.dtype) -> PackedMap:
    kept, length = int(index.offsets[-1]), query.shape[0]
    scales = torch.zeros(kept, 64) if dtype == torch.uint8 else None
    storage, slot_ids = MapStorage(torch.zeros(kept, 64, 64, dtype=dtype), scales), torch.randperm(kept).int()
    rows = rows_at(range(length))
    return pack_map(query, keys, slice(0, length), rows, index, scale=DIM**-0.5, storage=storage, slot_ids=slot_ids)


def _weights(mixed: int) -> torch.Tensor:
    """Weights [H_S, H_R] that sum to 1, with `mixed` sender heads of a receiver head."""
    kept = torch.rand(SENDERS, RECEIVERS).argsort(dim=0) < mixed
    return torch.softmax(torch.randn(SENDERS, RECEIVERS).masked_fill(~kept, float("-inf")), dim=0)


def _real_maps(folder: Path) -> None:
    from real_masks import masks_of

    table = Table(title=f"map_attention on the maps of {folder.name} (uint8); {setting()}; sum over every fifth layer")
    for column in ("tokens", "top-p", "density", "union", "mixed heads", "SDPA", "SDPA / ours", "auto takes"):
        table.add_column(column, justify="right")
    for length in track((1024, 2048, 4096), description="real maps"):
        layers = masks_of(folder, length)[::5]
        for top_p, mixed in ((0.7, 9), (0.7, 2), (0.87, 9), (0.87, 2)):
            table.add_row(str(length), f"{top_p:.2f}", *_of_layers(layers, top_p, mixed))
    Console(width=150).print(table)


def _of_layers(layers: "list[Captured]", top_p: float, mixed: int) -> list[str]:
    torch.manual_seed(0)
    dense_s, ours_s, density, union, chosen = 0.0, 0.0, 0.0, 0.0, set()
    for layer in layers:
        index = select_blocks(layer.mass, top_p=top_p)
        blocks = index.blocks.numel()
        density += index.columns.numel() / (SENDERS * blocks * (blocks + 1) / 2) / len(layers)
        union += union_density(index) / len(layers)
        packed = _packed(layer.query, layer.keys, index, torch.uint8)
        times = _times(packed, _weights(mixed), layer.values, ("auto",))
        dense_s += statistics.median(times.taken["SDPA"])
        ours_s += statistics.median(times.taken["auto"])
        chosen.add(times.chosen)
    figures = [f"{dense_s * 1e3:.0f} ms", f"{dense_s / ours_s:.1f}×", ", ".join(sorted(chosen))]
    return [f"{density:.2f}", f"{union:.2f}", str(mixed), *figures]


if __name__ == "__main__":
    assert dispatch.library.load() is not None, "build the library first: python -m crossfill_kernels.native.build"
    main()
