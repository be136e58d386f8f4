"""Mixing masses and choosing blocks, against the guided attention that they serve, one thread. Run: make bench."""

import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from masks import striped_mass
from paired import paired_seconds, setting

from crossfill_kernels import dispatch
from crossfill_kernels.guided_attention import guided_attention
from crossfill_kernels.mix_mass import mix_mass, quantise_mass
from crossfill_kernels.rows import rows_at
from crossfill_kernels.select_blocks import select_blocks, select_blocks_reference

HEADS, KV_HEADS, DIM, ROUNDS = 9, 3, 64, 9
# (tokens, share of the mass).
CASES = ((1024, 0.87), (2048, 0.87), (4096, 0.70), (4096, 0.87), (4096, 0.95))


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(
        title=f"select_blocks: {HEADS}/{KV_HEADS} heads, d {DIM}; {setting()}; median of {ROUNDS} paired rounds"
    )
    for column in ("tokens", "share", "density", "mix", "select", "attend", "(mix + select) / attend"):
        table.add_column(column, justify="right")
    for length, share in track(CASES, description="select_blocks"):
        table.add_row(*_row(length, share))
    Console().print(table)


def _row(length: int, share: float) -> list[str]:
    torch.manual_seed(0)
    blocks, rows = length // 64, rows_at(range(length))
    mass, weights = striped_mass(HEADS, blocks), torch.softmax(torch.randn(HEADS, HEADS), dim=0)
    query, out = torch.randn(length, HEADS, DIM), torch.empty(length, HEADS, DIM)
    keys, values = torch.randn(2, length, KV_HEADS, DIM).unbind()
    quantised = quantise_mass(mass)
    mixed = mix_mass(quantised, weights, blocks)
    index = select_blocks(mixed, top_p=share)
    assert torch.equal(index.columns, select_blocks_reference(mixed, top_p=share).columns)
    attend = partial(guided_attention, query, keys, values, slice(0, length), rows, index, scale=DIM**-0.5, out=out)
    taken = paired_seconds(
        {
            "mix": lambda: mix_mass(quantised, weights, blocks),
            "select": lambda: select_blocks(mixed, top_p=share),
            "attend": attend,
        },
        ROUNDS,
    )
    ratio = statistics.median(m + s for m, s in zip(taken["mix"], taken["select"], strict=True))
    ratio /= statistics.median(taken["attend"])
    density = index.columns.numel() / (HEADS * blocks * (blocks + 1) / 2)
    times = [f"{statistics.median(seconds) * 1e3:.2f} ms" for seconds in taken.values()]
    return [str(length), f"{share:.2f}", f"{density:.2f}", *times, f"{ratio:.1%}"]


if __name__ == "__main__":
    assert dispatch.library.load() is not None, "build the library first: python -m crossfill_kernels.native.build"
    main()
