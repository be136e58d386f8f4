"""Attention of a context through which gradients reach the weights of a mixture of heads: by maps, and by gates.

Maps of a context of 1,024 tokens take 38 MB a layer of nine heads, so none is kept for the way back: rows are made anew
there, some at a time. Contexts are whole row blocks, and no row looks beyond its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from crossfill_kernels.guided_attention import guided_attention
from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import BLOCK, rows_at
from engines.models.healing.network import attend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from crossfill_kernels.blocks import BlockIndex
    from engines.calibration.observation import Layer

# Made at once: enough for products to be fast, few enough to leave out most of what comes after the rows.
_ROWS = 2 * BLOCK
# Below it shares are rounding, and nothing is divided by them.
_LEAST_SHARE = 1e-6


def exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Dense causal attention [n, H, d] of the last n rows of a text; differentiable where gradients are wanted."""
    count, context = query.shape[0], keys.shape[0]
    if not (torch.is_grad_enabled() and query.requires_grad):
        out = torch.empty_like(query)
        rows = rows_at(range(context - count, context))
        paged_attention(query, keys, values, slice(0, context), rows, scale=scale, out=out)
        return out
    heads_first = [one.transpose(0, 1)[None] for one in (query, keys, values)]
    found = attend(heads_first[0], heads_first[1], heads_first[2], scale)
    return found[0].transpose(0, 1)


@dataclass(frozen=True)
class Maps:
    """A sender layer's maps of a context.

    Attributes:
        layer: what they are made from.
        kept: bool [H_S, R, R], the blocks that are left of them; rows sum to 1 again. None leaves all.
    """

    layer: Layer
    kept: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """float32 [H_S, stop - start, stop] of whole row blocks."""
        found = self.layer.map(start, stop)
        if self.kept is None:
            return found
        kept = self.kept[:, start // BLOCK : stop // BLOCK, : stop // BLOCK]
        found = found * kept.repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)
        return found / found.sum(dim=-1, keepdim=True)


def mapped(values: torch.Tensor, weights: torch.Tensor, maps: Maps) -> torch.Tensor:
    """Attention by mixed maps, O[p, h] = Σ_t (Σ_k W[k, h] · A_k[p, t]) · v[t, h // G] (MapFlow, § Head mixing).

    Args:
        values: float32 [P, H_kv, d] of the context.
        weights: float32 [H_S, H_R].
        maps: of the same context.

    Returns:
        [P, H_R, d], differentiable in values and weights.
    """
    out: torch.Tensor = _Mapped.apply(values, weights, maps)  # type: ignore[no-untyped-call]
    return out


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weights: torch.Tensor, maps: Maps) -> torch.Tensor:
        ctx.save_for_backward(values, weights)
        ctx.maps = maps
        count, kv_heads, dim = values.shape
        out = values.new_empty(count, weights.shape[1], dim)
        for start, stop in _parts(count):
            mixed = _mix(maps.rows(start, stop), weights)
            out[start:stop] = _from_groups(_group(mixed, kv_heads) @ values[:stop].transpose(0, 1), stop - start)
        return out

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        values, weights = ctx.saved_tensors
        kv_heads, heads = values.shape[1], weights.shape[1]
        of_values, of_weights = torch.zeros_like(values), torch.zeros_like(weights)
        for start, stop in _parts(values.shape[0]):
            maps = ctx.maps.rows(start, stop)
            rows = _to_groups(slope[start:stop], kv_heads)
            of_mixed = (rows @ values[:stop].permute(1, 2, 0)).view(heads, -1)
            of_weights += maps.flatten(1) @ of_mixed.T
            mixed = _group(_mix(maps, weights), kv_heads)
            of_values[:stop] += (mixed.transpose(1, 2) @ rows).transpose(0, 1)
        return of_values, of_weights, None


def gates(shares: torch.Tensor, kept: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of every block whether it is kept, 1 or 0, with the slope of a gate that opens as its share rises.

    A choice of blocks has no slope, so that of a sigmoid stands in for it (straight-through): of how far the share is
    from where the row's choice ends, by a multiple of where that is, as shares of long rows are small. That end moves
    with the shares so that the row keeps as many: nearly every block would bring the answer nearer to the dense run's,
    and how many are kept is for top-p to say. The first block and the diagonal are always kept, and rows that keep all
    have nothing to choose, so they have no slope.

    Args:
        shares: float32 [H, R, R], masses of blocks as shares of a row's.
        kept: bool [H, R, R], of each row block the greatest shares, the first block and the diagonal.
        temperature: how far from the end, as a multiple of it, a gate has a slope.
    """
    blocks = torch.arange(shares.shape[2])
    free = (blocks > 0) & (blocks < blocks[:, None])
    hard, level = kept.to(shares.dtype), shares.detach()
    least = level.masked_fill(~(kept & free), float("inf")).amin(dim=-1, keepdim=True)
    most = level.masked_fill(kept | ~free, -1.0).amax(dim=-1, keepdim=True)
    end = ((torch.minimum(least, torch.ones_like(least)) + most) / 2).where(least.isfinite(), most)
    free = free & (most >= 0)
    width = temperature * end.clamp_min(_LEAST_SHARE)
    open_ = ((level - end) / width).sigmoid()
    slope = (open_ * (1 - open_)).where(free, 0.0)
    # The end moves by the mean of the shares that have a slope.
    moves = (slope * shares).sum(dim=-1, keepdim=True) / slope.sum(dim=-1, keepdim=True).clamp_min(_LEAST_SHARE)
    tilt = slope * (shares - moves) / width
    return hard + (tilt - tilt.detach())


def gated(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    opened: torch.Tensor,
    index: BlockIndex,
    scale: float,
) -> torch.Tensor:
    """Exact attention over kept blocks, as served, with a slope for every gate.

    O = Σ_j g_j e_j v_j / Σ_j g_j e_j. The slope of a gate that is open is the derivative; that of one that is shut is
    the whole change if it opened. Both are Σ e_j (v_j - O) over the block, by the row's sum of e with the block in it.

    Args:
        query: float32 [P, H, d] of the context.
        keys, values: float32 [P, H_kv, d].
        opened: float32 [H, R, R], of the `gates`; only its gradient is used.
        index: what is kept.
        scale: of the scores.

    Returns:
        [P, H, d], differentiable in all tensors.
    """
    out: torch.Tensor = _Gated.apply(query, keys, values, opened, index, scale)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        opened: torch.Tensor,
        index: BlockIndex,
        scale: float,
    ) -> torch.Tensor:
        count, out = query.shape[0], torch.empty_like(query)
        guided_attention(query, keys, values, slice(0, count), rows_at(range(count)), index, scale=scale, out=out)
        ctx.save_for_backward(query, keys, values, out)
        ctx.kept, ctx.scale = index.mask(opened.shape[2]), scale
        return out

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, keys, values, out = ctx.saved_tensors
        kv_heads = keys.shape[1]
        of_query, of_keys, of_values = (torch.zeros_like(one) for one in (query, keys, values))
        of_gates = query.new_zeros(ctx.kept.shape)
        for start, stop in _parts(query.shape[0]):
            first, last = start // BLOCK, stop // BLOCK
            kept = ctx.kept[:, first:last, :last]
            asking, rows = (_to_groups(one[start:stop], kv_heads) for one in (query, slope))
            seen, held = keys[:stop].transpose(0, 1), values[:stop].transpose(0, 1)
            parts = _probabilities(asking @ seen.transpose(1, 2) * ctx.scale, kept)
            agree = (slope[start:stop] * out[start:stop]).sum(dim=-1).T
            change = parts * ((rows @ held.transpose(1, 2)).view_as(parts) - agree.view(*parts.shape[:3], 1, 1))
            of_gates[:, first:last, :last] = change.sum(dim=(2, 4))
            there = kept[:, :, None, :, None]
            parts, change = (_group((one * there).reshape(len(kept), -1, stop), kv_heads) for one in (parts, change))
            of_query[start:stop] = _from_groups(change @ seen, stop - start) * ctx.scale
            of_keys[:stop] += (change.transpose(1, 2) @ asking).transpose(0, 1) * ctx.scale
            of_values[:stop] += (parts.transpose(1, 2) @ rows).transpose(0, 1)
        return of_query, of_keys, of_values, of_gates, None, None


def _probabilities(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Of every key, by the sum over the kept blocks and its own.

    Args:
        scores: [H_kv, G · n, m], the last n rows of m.
        kept: bool [H, n / 64, m / 64].

    Returns:
        [H, n / 64, 64, m / 64, 64].
    """
    heads, rows, columns = kept.shape
    stop = columns * BLOCK
    later = torch.arange(stop) > torch.arange(stop - rows * BLOCK, stop)[:, None]
    tiles = scores.view(heads, rows * BLOCK, stop).masked_fill(later, float("-inf"))
    tiles = tiles.view(heads, rows, BLOCK, columns, BLOCK)
    sums = tiles.logsumexp(dim=-1)
    there = kept[:, :, None, :]
    whole = sums.masked_fill(~there, float("-inf")).logsumexp(dim=-1, keepdim=True)
    return (tiles - torch.where(there, whole, torch.logaddexp(whole, sums))[..., None]).exp_()


def _parts(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _ROWS):
        yield start, min(count, start + _ROWS)


def _mix(maps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[H_R, n, m] of [H_S, n, m]."""
    return (weights.T @ maps.flatten(1)).view(-1, *maps.shape[1:])


def _group(maps: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[H, n, m] as [H_kv, G · n, m]: heads that share values are rows of one product."""
    return maps.reshape(kv_heads, -1, maps.shape[-1])


def _to_groups(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[n, H, d] as [H_kv, G · n, d]."""
    count, heads, dim = rows.shape
    return rows.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def _from_groups(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `_to_groups`."""
    return rows.view(-1, count, rows.shape[-1]).transpose(0, 1)
