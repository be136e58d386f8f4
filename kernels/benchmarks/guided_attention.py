"""Guided attention against torch's causal SDPA of the same heads, paired, one thread. Run: make bench.

With --flex, torch's compiled FlexAttention on the same blocks stands beside it (compiling takes about 10 s a shape).
With --model FOLDER, the masks are those of a real model on a real text.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from masks import striped_index
from paired import causal_sdpa, median_ratio, paired_seconds, setting

from crossfill_kernels.blocks import BlockIndex
from crossfill_kernels.guided_attention import guided_attention, guided_attention_reference
from crossfill_kernels.rows import rows_at

SHAPES = ((9, 3, 64), (16, 8, 128))
LENGTHS = (1024, 2048, 4096, 8192)
DENSITIES = (0.05, 0.10, 0.20, 0.30)
ROUNDS = 5


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flex", action="store_true", help="compile and time FlexAttention too")
    parser.add_argument("--model", type=Path, help="a model's folder: time its own masks instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model is not None:
        _real_masks(options.model)
        return
    table = Table(title=f"guided_attention: time of causal SDPA / ours; {setting()}; median of {ROUNDS} paired rounds")
    for column in ("heads, d", "tokens", "SDPA", *(f"ρ {density:.2f}" for density in DENSITIES)):
        table.add_column(column, justify="right")
    if options.flex:
        for density in DENSITIES:
            table.add_column(f"flex ρ {density:.2f}", justify="right")
    cases = [(*shape, length) for shape in SHAPES for length in LENGTHS]
    for heads, kv_heads, dim, length in track(cases, description="guided_attention"):
        table.add_row(*_row(heads, kv_heads, dim, length, flex=options.flex))
    Console(width=150).print(table)


def _row(heads: int, kv_heads: int, dim: int, length: int, *, flex: bool) -> list[str]:
    torch.manual_seed(0)
    query = torch.randn(length, heads, dim)
    keys, values = torch.randn(2, length, kv_heads, dim).unbind()
    functions: dict[str, Callable[[], object]] = {"sdpa": causal_sdpa(query, keys, values)}
    for density in DENSITIES:
        blocks = length // 64
        # The sink and the diagonal alone are more than the least densities of short texts.
        least = (2 * blocks - 1) / (blocks * (blocks + 1) / 2)
        if density >= least:
            index = striped_index(heads, blocks, density)
            functions[f"{density}"] = _checked(query, keys, values, index)
            if flex:
                functions[f"flex {density}"] = _flex(query, keys, values, index)
    taken = paired_seconds(functions, ROUNDS)
    dense_ms = sorted(taken["sdpa"])[ROUNDS // 2] * 1e3
    wanted = [f"{density}" for density in DENSITIES] + ([f"flex {density}" for density in DENSITIES] if flex else [])
    ratios = [f"{median_ratio(taken['sdpa'], taken[name]):.1f}×" if name in taken else "–" for name in wanted]
    return [f"{heads}/{kv_heads}, {dim}", str(length), f"{dense_ms:.0f} ms", *ratios]


def _checked(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, index: BlockIndex) -> Callable[[], None]:
    """Guided attention of all rows, after its last block of rows was compared with the reference."""
    length = query.shape[0]
    rows, out, scale = rows_at(range(length)), torch.full_like(query, float("nan")), query.shape[2] ** -0.5

    def run() -> None:
        guided_attention(query, keys, values, slice(0, length), rows, index, scale=scale, out=out)

    run()
    newest, last = rows_at(range(length - 64, length)), _last_lists(index)
    want = guided_attention_reference(query[-64:], keys, values, slice(0, length), newest, last, scale=scale)
    torch.testing.assert_close(out[-64:], want, atol=1e-5, rtol=1e-5)
    return run


def _last_lists(index: BlockIndex) -> BlockIndex:
    """The lists of the last row block alone."""
    count = index.blocks.numel()
    lists = [
        index.columns[index.offsets[head * count + count - 1] : index.offsets[(head + 1) * count]]
        for head in range(index.heads)
    ]
    offsets = torch.zeros(index.heads + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor([part.numel() for part in lists]).cumsum(0)
    return BlockIndex(index.heads, index.blocks[-1:].contiguous(), offsets, torch.cat(lists))


def _flex(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, index: BlockIndex) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    length = query.shape[0]
    mask = index.mask(length // 64)
    whole = mask & ~torch.eye(length // 64, dtype=torch.bool)
    diagonal = mask & torch.eye(length // 64, dtype=torch.bool)

    def lists(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = kept.int().argsort(dim=-1, descending=True, stable=True)
        return kept.sum(dim=-1).int()[None], order.int()[None]

    def causal(b: torch.Tensor, h: torch.Tensor, q_index: torch.Tensor, kv_index: torch.Tensor) -> torch.Tensor:
        return q_index >= kv_index

    blocks = BlockMask.from_kv_blocks(*lists(diagonal), *lists(whole), BLOCK_SIZE=64, mask_mod=causal)
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (tensor.transpose(0, 1)[None].contiguous() for tensor in (query, keys, values))
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True)


def _real_masks(folder: Path) -> None:
    from real_masks import masks_of

    table = Table(title=f"guided_attention on the masks of {folder.name}; {setting()}; every fifth layer")
    for column in ("tokens", "top-p", "density", "union", "SDPA", "SDPA / ours"):
        table.add_column(column, justify="right")
    for length in track((1024, 2048, 4096), description="real masks"):
        layers = masks_of(folder, length)[::5]
        for top_p in (0.7, 0.87, 0.95):
            table.add_row(str(length), f"{top_p:.2f}", *_of_layers(layers, top_p))
    Console(width=150).print(table)


def _of_layers(layers: "list[Captured]", top_p: float) -> list[str]:  # noqa: F821  # real_masks loads transformers
    from masks import union_density

    from crossfill_kernels.select_blocks import select_blocks

    dense_s, ours_s, density, union = 0.0, 0.0, 0.0, 0.0
    for layer in layers:
        index = select_blocks(layer.mass, top_p=top_p)
        run = _checked(layer.query, layer.keys, layer.values, index)
        taken = paired_seconds({"sdpa": causal_sdpa(layer.query, layer.keys, layer.values), "ours": run}, 3)
        dense_s, ours_s = dense_s + sorted(taken["sdpa"])[1], ours_s + sorted(taken["ours"])[1]
        blocks = index.blocks.numel()
        density += float(index.offsets[-1]) / (index.heads * blocks * (blocks + 1) / 2) / len(layers)
        union += union_density(index) / len(layers)
    return [f"{density:.3f}", f"{union:.2f}", f"{dense_s * 1e3:.0f} ms", f"{dense_s / ours_s:.1f}×"]


if __name__ == "__main__":
    main()
