"""Paged attention against torch on the same rows, paired, one thread. Run: make bench."""

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from paired import median_ratio, paired_seconds, setting

from crossfill_kernels.paged_attention import paged_attention, paged_attention_reference
from crossfill_kernels.paged_attention.flash import paged_attention_flash
from crossfill_kernels.rows import newest_rows, rows_at

# (new rows, context): decodes, a two-token extend, whole prompts, chunks of longer ones.
CASES = ((1, 64), (1, 1024), (1, 4096), (2, 1002), (16, 1024), (1024, 1024), (512, 2048), (1024, 4096), (2048, 8192))
SHAPES = ((9, 3, 64), (16, 8, 128))
ROUNDS, CALLS_OF_SHORT = 9, 50


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"paged_attention: time of torch / ours; {setting()}; median of {ROUNDS} paired rounds")
    for column in ("heads, d", "rows", "context", "ours", "one masked SDPA", "two merged flash calls"):
        table.add_column(column, justify="right")
    for shape in SHAPES:
        for rows, context in track(CASES, description="paged_attention"):
            table.add_row(*_row(*shape, rows, context))
    Console(width=120).print(table)


def _row(heads: int, kv_heads: int, dim: int, count: int, context: int) -> list[str]:
    torch.manual_seed(0)
    query = torch.randn(count, heads, dim)
    keys, values = torch.randn(2, context, kv_heads, dim).unbind()
    slots, rows, out, scale = slice(0, context), newest_rows(count, context), torch.empty_like(query), dim**-0.5
    mask = None if count == 1 else torch.arange(context)[None, :] <= rows.positions[:, None]
    q, k, v = (t.transpose(0, 1)[None] for t in (query, keys, values))
    calls = CALLS_OF_SHORT if count <= 16 else 1

    def ours() -> None:
        for _ in range(calls):
            paged_attention(query, keys, values, slots, rows, scale=scale, out=out)

    def masked() -> None:
        for _ in range(calls):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    def merged() -> None:
        for _ in range(calls):
            paged_attention_flash(query, keys, values, slots, scale=scale, out=out)

    ours()
    some = min(count, 64)
    newest = rows_at(range(context - some, context))
    want = paged_attention_reference(query[-some:], keys, values, slots, newest, scale=scale)
    torch.testing.assert_close(out[-some:], want, atol=1e-5, rtol=1e-5)
    taken = paired_seconds({"ours": ours, "masked": masked, "merged": merged}, ROUNDS)
    ratios = [f"{median_ratio(taken[name], taken['ours']):.2f}×" for name in ("masked", "merged")]
    ours_ms = statistics.median(taken["ours"]) / calls * 1e3
    return [f"{heads}/{kv_heads}, {dim}", str(count), str(context), f"{ours_ms:.3g} ms", *ratios]


if __name__ == "__main__":
    main()
