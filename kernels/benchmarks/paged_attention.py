"""Paged attention against torch's masked SDPA on the same rows, paired, one thread. Run: make bench."""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from crossfill_kernels.paged_attention import as_slots, paged_attention, paged_attention_reference

# (new rows, context): a decode, a two-token extend, a whole prompt, chunks of a longer one.
CASES = ((1, 1024), (2, 1002), (1024, 1024), (512, 2048), (1024, 4096), (2048, 8192))
HEADS, KV_HEADS, DIM, ROUNDS = 9, 3, 64, 7


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(
        title=f"CPU, one thread, float32, {HEADS}/{KV_HEADS} heads, d {DIM}; median of {ROUNDS} paired rounds"
    )
    for column in ("rows", "context", "ours", "masked SDPA", "SDPA / ours"):
        table.add_column(column, justify="right")
    for rows, context in track(CASES, description="paged_attention"):
        ours_s, masked_s = _measure(rows, context)
        table.add_row(
            str(rows), str(context), f"{ours_s * 1e3:.2f} ms", f"{masked_s * 1e3:.2f} ms", f"{masked_s / ours_s:.2f}×"
        )
    Console().print(table)


def _measure(rows: int, context: int) -> tuple[float, float]:
    torch.manual_seed(0)
    query = torch.randn(rows, HEADS, DIM)
    keys, values = torch.randn(2, context, KV_HEADS, DIM).unbind()
    slots, out = as_slots(torch.arange(context)), torch.empty_like(query)
    mask = torch.arange(context)[None, :] <= torch.arange(context - rows, context)[:, None]
    q, k, v = (t.transpose(0, 1)[None] for t in (query, keys, values))

    def ours() -> None:
        paged_attention(query, keys, values, slots, scale=DIM**-0.5, out=out)

    def masked() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    ours()
    want = paged_attention_reference(query[-64:], keys, values, slots, scale=DIM**-0.5)
    torch.testing.assert_close(out[-64:], want, atol=1e-5, rtol=1e-5)
    masked()
    pairs = [(_seconds(ours), _seconds(masked)) for _ in range(ROUNDS)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def _seconds(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
