"""Distance to anchors against reconstructing them and against the expansion, paired, one thread. Run: make bench."""

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from paired import median_ratio, paired_seconds, setting

from crossfill_kernels.anchor_distance import anchor_distance, anchor_distance_reference

# (tokens, D): D of SmolLM2-135M and of Qwen3-1.7B.
CASES = ((96, 192), (512, 192), (2048, 192), (512, 1024), (2048, 1024))
ANCHORS, RANK, ROUNDS = 10, 32, 9


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"anchor_distance: {setting()}; {ANCHORS} anchors of rank {RANK}; {ROUNDS} paired rounds")
    columns = ("tokens, D", "ours", "reconstruction / ours", "float64 expansion / ours", "float32 expansion / ours")
    for column in (*columns, "its error", "our error"):
        table.add_column(column, justify="right")
    for case in track(CASES, description="anchor_distance"):
        table.add_row(*_row(*case))
    Console(width=140).print(table)


def _row(length: int, width: int) -> list[str]:
    torch.manual_seed(0)
    left, right = torch.randn(ANCHORS, length, RANK), torch.randn(ANCHORS, RANK, width)
    # All but equal to the first anchor, where it matters most.
    segment = left[0] @ right[0]
    segment += 1e-4 * torch.randn(length, width) * segment.norm() / segment.numel() ** 0.5

    def expansion(dtype: torch.dtype) -> torch.Tensor:
        c, a, b = segment.to(dtype), left.to(dtype), right.to(dtype)
        cross = ((c @ b.flatten(0, 1).T).view(length, ANCHORS, RANK) * a.transpose(0, 1)).sum((0, 2))
        squares = (torch.bmm(a.mT, a) * torch.bmm(b, b.mT)).sum((1, 2))
        return (c.square().sum() - 2 * cross + squares).clamp_min(0).sqrt().float()

    functions = {
        "ours": lambda: anchor_distance(segment, left, right),
        "reconstruction": lambda: (segment - left @ right).flatten(1).norm(dim=1),
        "float64": lambda: expansion(torch.float64),
        "float32": lambda: expansion(torch.float32),
    }
    want = anchor_distance_reference(segment, left, right)
    errors = {name: ((functions[name]() - want).abs().max() / segment.norm()).item() for name in ("float32", "ours")}
    assert errors["ours"] < 1e-6
    taken = paired_seconds(functions, ROUNDS)
    ratios = [f"{median_ratio(taken[name], taken['ours']):.2f}×" for name in list(functions)[1:]]
    times = [f"{length}, {width}", f"{statistics.median(taken['ours']) * 1e3:.2f} ms", *ratios]
    return [*times, *(f"{error:.0e}·‖C‖" for error in errors.values())]


if __name__ == "__main__":
    main()
