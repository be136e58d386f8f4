"""Re-rotation of cached keys against torch's composed rotary embedding, paired, one thread. Run: make bench."""

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from paired import median_ratio, paired_seconds, setting

from crossfill_kernels.rope_rerotate import rope_rerotate_reference, rotate_keys, rotation_by

# (KV heads, d): SmolLM2-135M, Qwen3-1.7B.
CASES = tuple((heads, dim, length) for heads, dim in ((3, 64), (8, 128)) for length in (96, 2048))
ROUNDS = 31


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"rope_rerotate: {setting()}; median of {ROUNDS} paired rounds")
    for column in ("KV heads, d", "tokens", "ours", "composed / ours", "scattered", "composed / ours"):
        table.add_column(column, justify="right")
    for case in track(CASES, description="rope_rerotate"):
        table.add_row(*_row(*case))
    Console(width=120).print(table)


def _row(heads: int, dim: int, length: int) -> list[str]:
    torch.manual_seed(0)
    keys, cache = torch.randn(length, heads, dim), torch.zeros(2 * length, heads, dim)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, dim, 2).float() / dim)
    rotation, slots = rotation_by(500, inv_freq), torch.randperm(2 * length)[:length]
    cos, sin = (torch.cat([part, part], dim=-1)[:, None] for part in (rotation.cos, rotation.sin))

    def composed() -> torch.Tensor:
        first, second = keys.chunk(2, dim=-1)
        return keys * cos + torch.cat([-second, first], dim=-1) * sin

    functions = {
        "ours": lambda: rotate_keys(keys, rotation, out=cache, out_slots=slice(0, length)),
        "composed": lambda: cache[:length].copy_(composed()),
        "scattered": lambda: rotate_keys(keys, rotation, out=cache, out_slots=slots),
        "composed, scattered": lambda: cache.index_copy_(0, slots, composed()),
    }
    want = rope_rerotate_reference(keys, 500, inv_freq)
    for name, rows in (("ours", slice(0, length)), ("scattered", slots)):
        functions[name]()
        torch.testing.assert_close(cache[rows], want, atol=1e-5, rtol=1e-5)
    taken = paired_seconds(functions, ROUNDS)
    cells = [f"{heads}, {dim}", str(length)]
    for ours, other in (("ours", "composed"), ("scattered", "composed, scattered")):
        cells += [f"{statistics.median(taken[ours]) * 1e3:.3f} ms", f"{median_ratio(taken[other], taken[ours]):.1f}×"]
    return cells


if __name__ == "__main__":
    main()
