"""Attention with block masses against the same kernel without, paired, one thread. Run: make bench."""

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from paired import causal_sdpa, median_ratio, paired_seconds, setting

from crossfill_kernels.block_mass import block_mass, block_mass_reference, block_mass_sampled
from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import rows_at

SHAPES = ((9, 3, 64), (16, 8, 128))
LENGTHS = (1024, 2048, 4096, 8192)
ROUNDS = 5


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"block_mass; {setting()}; median of {ROUNDS} paired rounds")
    for column in ("heads, d", "tokens", "SDPA / block_mass", "block_mass / without mass", "sampled / without mass"):
        table.add_column(column, justify="right")
    cases = [(*shape, length) for shape in SHAPES for length in LENGTHS]
    for heads, kv_heads, dim, length in track(cases, description="block_mass"):
        table.add_row(f"{heads}/{kv_heads}, {dim}", str(length), *_ratios(heads, kv_heads, dim, length))
    Console(width=120).print(table)


def _ratios(heads: int, kv_heads: int, dim: int, length: int) -> list[str]:
    torch.manual_seed(0)
    query = torch.randn(length, heads, dim)
    keys, values = torch.randn(2, length, kv_heads, dim).unbind()
    slots, rows, out, scale = slice(0, length), rows_at(range(length)), torch.empty_like(query), dim**-0.5
    mass = block_mass(query, keys, values, slots, rows, scale=scale, out=out).mass
    want_out, want, _ = block_mass_reference(
        query[-64:], keys, values, slots, rows_at(range(length - 64, length)), scale=scale
    )
    torch.testing.assert_close(mass[:, -1:], want.mass, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[-64:], want_out, atol=1e-5, rtol=1e-5)
    taken = paired_seconds(
        {
            "sdpa": causal_sdpa(query, keys, values),
            "without": lambda: paged_attention(query, keys, values, slots, rows, scale=scale, out=out),
            "mass": lambda: block_mass(query, keys, values, slots, rows, scale=scale, out=out),
            "sampled": lambda: block_mass_sampled(query, keys, slots, rows, scale=scale),
        },
        ROUNDS,
    )
    pairs = (("sdpa", "mass"), ("mass", "without"), ("sampled", "without"))
    return [f"{median_ratio(taken[above], taken[below]):.2f}×" for above, below in pairs]


if __name__ == "__main__":
    main()
