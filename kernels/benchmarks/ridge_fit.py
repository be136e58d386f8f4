"""A ridge fit from streamed sums against least squares on all rows at once, paired, one thread. Run: make bench."""

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from paired import median_ratio, paired_seconds, setting

from crossfill_kernels.ridge_fit import RidgeMap, RidgeSums, ridge_fit_reference

# (segments, tokens of each, D).
CASES = ((5, 96, 192), (20, 96, 192), (5, 512, 192))
RIDGE, ROUNDS = 1.0, 3


def main() -> None:
    """Print a table of medians; a fit that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"ridge_fit: {setting()}; median of {ROUNDS} paired rounds")
    for column in ("segments, tokens, D", "sums", "and a fit of rank 32", "least squares / both"):
        table.add_column(column, justify="right")
    for case in track(CASES, description="ridge_fit"):
        table.add_row(*_row(*case))
    Console(width=120).print(table)


def _row(segments: int, length: int, width: int) -> list[str]:
    torch.manual_seed(0)
    x, y = torch.randn(2, segments, length, width).unbind()

    def sums() -> RidgeSums:
        streamed = RidgeSums(width)
        for source, delta in zip(x, y, strict=True):
            streamed.add(source, delta)
        return streamed

    def at_once() -> RidgeMap:
        return ridge_fit_reference(x.flatten(0, 1), y.flatten(0, 1), RIDGE)

    torch.testing.assert_close(sums().solve(RIDGE).weights, at_once().weights, atol=1e-6, rtol=1e-6)
    functions = {"sums": sums, "fit": lambda: sums().solve(RIDGE, rank=32), "at once": at_once}
    taken = paired_seconds(functions, ROUNDS)
    times = [f"{statistics.median(taken[name]) * 1e3:.1f} ms" for name in ("sums", "fit")]
    return [f"{segments}, {length}, {width}", *times, f"{median_ratio(taken['at once'], taken['fit']):.1f}×"]


if __name__ == "__main__":
    main()
