"""Choosing blocks, and making, mixing masses, against the guided attention that they serve. Run: make bench."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from masks import striped_mass

from crossfill_kernels import dispatch
from crossfill_kernels.guided_attention import guided_attention
from crossfill_kernels.mix_mass import mix_mass, mix_mass_reference, quantise_mass, quantise_mass_reference
from crossfill_kernels.rows import rows_at
from crossfill_kernels.select_blocks import select_blocks, select_blocks_reference

HEADS, KV_HEADS, DIM, ROUNDS = 9, 3, 64, 9
# (tokens, share of the mass).
CASES = ((1024, 0.87), (2048, 0.87), (4096, 0.70), (4096, 0.87), (4096, 0.95))


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"CPU, one thread, {HEADS}/{KV_HEADS} heads, d {DIM}; median of {ROUNDS} rounds")
    for column in ("tokens", "share", "density", "quantise", "mix", "select", "guided attention", "mix + select"):
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
    assert torch.equal(quantised.codes, quantise_mass_reference(mass).codes)
    mixed = mix_mass(quantised, weights, blocks)
    torch.testing.assert_close(mixed.mass, mix_mass_reference(quantised, weights, blocks).mass, atol=1e-5, rtol=1e-5)
    index = select_blocks(mixed, top_p=share)
    assert torch.equal(index.columns, select_blocks_reference(mixed, top_p=share).columns)
    seconds = [
        _median(function)
        for function in (
            lambda: quantise_mass(mass),
            lambda: mix_mass(quantised, weights, blocks),
            lambda: select_blocks(mixed, top_p=share),
            lambda: guided_attention(query, keys, values, slice(0, length), rows, index, scale=DIM**-0.5, out=out),
        )
    ]
    density = index.columns.numel() / (HEADS * blocks * (blocks + 1) / 2)
    times = [f"{s * 1e3:.2f} ms" for s in seconds]
    return [str(length), f"{share:.2f}", f"{density:.2f}", *times, f"{(seconds[1] + seconds[2]) / seconds[3]:.1%}"]


def _median(function: Callable[[], object]) -> float:
    function()
    return statistics.median(_seconds(function) for _ in range(ROUNDS))


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    assert dispatch.library.load() is not None, "build the library first: python -m crossfill_kernels.native.build"
    main()
