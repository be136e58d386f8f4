"""Correction by low-rank anchors against a loop over the anchors, paired, one thread. Run: make bench."""

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from paired import median_ratio, paired_seconds, setting

from crossfill_kernels.lowrank_correct import lowrank_correct, lowrank_correct_reference
from crossfill_kernels.rope_rerotate import rotation_by

# (KV heads, d): SmolLM2-135M, Qwen3-1.7B.
CASES = tuple((heads, dim, length) for heads, dim in ((3, 64), (8, 128)) for length in (96, 512, 2048))
ANCHORS, RANK, ROUNDS = 10, 32, 11


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    title = f"lowrank_correct: {setting()}; {ANCHORS} anchors of rank {RANK} to scattered rows; {ROUNDS} paired rounds"
    table = Table(title=title)
    for column in ("KV heads, d", "tokens", "values", "loop / ours", "keys", "loop / ours"):
        table.add_column(column, justify="right")
    for case in track(CASES, description="lowrank_correct"):
        table.add_row(*_row(*case))
    Console(width=120).print(table)


def _row(heads: int, dim: int, length: int) -> list[str]:
    torch.manual_seed(0)
    source, cache = torch.randn(length, heads, dim), torch.zeros(2 * length, heads, dim)
    left, right = torch.randn(ANCHORS, length, RANK), torch.randn(ANCHORS, RANK, heads * dim) / 8
    weights, slots = torch.rand(ANCHORS).softmax(0), torch.randperm(2 * length)[:length]
    rotation = rotation_by(500, 1.0 / 1e4 ** (torch.arange(0, dim, 2).float() / dim))
    cos, sin = (torch.cat([part, part], dim=-1)[:, None] for part in (rotation.cos, rotation.sin))

    def loop(*, keys: bool) -> None:
        first, second = source.chunk(2, dim=-1)
        rows = source * cos + torch.cat([-second, first], dim=-1) * sin if keys else source.clone()
        corrected = rows.flatten(1)
        for anchor in range(ANCHORS):
            corrected += weights[anchor] * (left[anchor] @ right[anchor])
        cache.index_copy_(0, slots, corrected.view_as(source))

    def ours(*, keys: bool) -> None:
        turn = rotation if keys else None
        lowrank_correct(source, left, right, weights, out=cache, rotation=turn, out_slots=slots)

    for keys in (False, True):
        want = lowrank_correct_reference(source, left, right, weights, rotation=rotation if keys else None)
        ours(keys=keys)
        torch.testing.assert_close(cache[slots], want, atol=1e-5, rtol=1e-5)
    functions = {
        "values": lambda: ours(keys=False),
        "values, loop": lambda: loop(keys=False),
        "keys": lambda: ours(keys=True),
        "keys, loop": lambda: loop(keys=True),
    }
    taken = paired_seconds(functions, ROUNDS)
    cells = [f"{heads}, {dim}", str(length)]
    for name in ("values", "keys"):
        ratio = median_ratio(taken[f"{name}, loop"], taken[name])
        cells += [f"{statistics.median(taken[name]) * 1e3:.2f} ms", f"{ratio:.2f}×"]
    return cells


if __name__ == "__main__":
    main()
