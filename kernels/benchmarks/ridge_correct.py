"""Correction by a ridge map against the product with its whole matrix, paired, one thread. Run: make bench."""

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from paired import median_ratio, paired_seconds, setting

from crossfill_kernels.ridge_correct import RidgeMap, ridge_correct, ridge_correct_reference

# (KV heads, d): SmolLM2-135M, Qwen3-1.7B.
CASES = tuple((heads, dim, length) for heads, dim in ((3, 64), (8, 128)) for length in (96, 512, 2048))
RANK, ROUNDS = 32, 11


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"ridge_correct: {setting()}; rank {RANK} to scattered rows; median of {ROUNDS} paired rounds")
    for column in ("KV heads, d", "tokens", "ours", "whole matrix / ours"):
        table.add_column(column, justify="right")
    for case in track(CASES, description="ridge_correct"):
        table.add_row(*_row(*case))
    Console(width=120).print(table)


def _row(heads: int, dim: int, length: int) -> list[str]:
    torch.manual_seed(0)
    width = heads * dim
    source, cache = torch.randn(length, heads, dim), torch.zeros(2 * length, heads, dim)
    slots, mean, bias = torch.randperm(2 * length)[:length], torch.randn(width), torch.randn(width)
    parts = [torch.randn(shape) / shape[0] ** 0.5 for shape in ((RANK, RANK), (width, RANK), (RANK, width))]
    state = RidgeMap(mean, parts[0], bias, parts[1], parts[2])
    matrix = parts[1] @ parts[0] @ parts[2]

    def whole() -> None:
        rows = source.flatten(1)
        cache.index_copy_(0, slots, (rows + (rows - mean) @ matrix + bias).view_as(source))

    def ours() -> None:
        ridge_correct(source, state, out=cache, out_slots=slots)

    ours()
    torch.testing.assert_close(cache[slots], ridge_correct_reference(source, state), atol=1e-5, rtol=1e-5)
    taken = paired_seconds({"ours": ours, "whole": whole}, ROUNDS)
    ratio = median_ratio(taken["whole"], taken["ours"])
    return [f"{heads}, {dim}", str(length), f"{statistics.median(taken['ours']) * 1e3:.2f} ms", f"{ratio:.2f}×"]


if __name__ == "__main__":
    main()
