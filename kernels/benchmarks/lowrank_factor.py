"""Low-rank factors against a whole singular value decomposition, paired, one thread. Run: make bench."""

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from paired import median_ratio, paired_seconds, setting

from crossfill_kernels.lowrank_factor import lowrank_factor

CASES = ((96, 192), (512, 192), (2048, 192), (512, 1024), (2048, 1024))
RANK, ROUNDS = 32, 3


def main() -> None:
    """Print a table of medians, and how far the randomised error is above the least."""
    torch.set_num_threads(1)
    table = Table(title=f"lowrank_factor: {setting()}; rank {RANK}; singular values 1/i; {ROUNDS} paired rounds")
    for column in ("tokens, D", "gram", "SVD / gram", "randomised", "SVD / randomised", "its excess error"):
        table.add_column(column, justify="right")
    for case in track(CASES, description="lowrank_factor"):
        table.add_row(*_row(*case))
    Console(width=120).print(table)


def _row(length: int, width: int) -> list[str]:
    torch.manual_seed(0)
    count = min(length, width)
    sigma = 1.0 / torch.arange(1, count + 1)
    matrix = (torch.linalg.qr(torch.randn(length, count))[0] * sigma) @ torch.linalg.qr(torch.randn(width, count))[0].T
    least = torch.linalg.svdvals(matrix.double())[RANK:].square().sum().sqrt()
    assert lowrank_factor(matrix, RANK, method="gram").error <= least * (1 + 1e-5)
    excess = (lowrank_factor(matrix, RANK, method="randomised").error / least - 1).item()
    functions = {
        "gram": lambda: lowrank_factor(matrix, RANK, method="gram"),
        "randomised": lambda: lowrank_factor(matrix, RANK, method="randomised"),
        "svd": lambda: torch.linalg.svd(matrix, full_matrices=False),
    }
    taken = paired_seconds(functions, ROUNDS)
    cells = [f"{length}, {width}"]
    for name in ("gram", "randomised"):
        ratio = median_ratio(taken["svd"], taken[name])
        cells += [f"{statistics.median(taken[name]) * 1e3:.1f} ms", f"{ratio:.1f}×"]
    return [*cells, f"{100 * excess:.2f} %"]


if __name__ == "__main__":
    main()
