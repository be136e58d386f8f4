"""The maths of block masses, in plain torch."""

import torch

from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.paged_attention.reference import causal_scores
from crossfill_kernels.rows import BLOCK, Rows, rows_at
from crossfill_kernels.slots import Slots


def block_mass_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    scale: float,
) -> tuple[torch.Tensor, BlockMass, torch.Tensor]:
    """Causal attention and its block masses (MapFlow, Algorithm 1).

        P[h, i, t] = softmax_{t ≤ p_i}(scale · q[i, h] · k[t, h // G]),   O[i, h] = Σ_t P[h, i, t] v[t, h // G]
        B[h, b, j] = Σ_{i: p_i // 64 = b} Σ_{t: t // 64 = j} P[h, i, t]

    Args:
        query: [n, H, d].
        key_cache, value_cache: [rows, H_kv, d].
        slots: cache rows of positions 0 … T-1.
        rows: positions of the query rows.
        scale: factor on the scores.

    Returns:
        O [n, H, d] in the dtype of `query`; B; and the rows' log-sum-exp [n, H] in float32. Computed in float64.
    """
    scores = causal_scores(query, key_cache, slots, rows, scale=scale)  # [H, n, T]
    probabilities = scores.softmax(dim=-1)
    group = query.shape[1] // key_cache.shape[1]
    values = value_cache[slots].double().repeat_interleave(group, dim=1)
    out = torch.einsum("hnt,thd->nhd", probabilities, values).to(query.dtype)
    return out, _masses(probabilities, rows), scores.logsumexp(dim=-1).T.float()


def block_mass_sampled_reference(
    query: torch.Tensor, key_cache: torch.Tensor, slots: Slots, rows: Rows, *, scale: float, stride: int
) -> BlockMass:
    """Block masses of a sample: of each row block the last row, the one `stride` rows before it, and so on.

    Args:
        query, key_cache, slots, rows, scale: as in `block_mass_reference`.
        stride: distance between sampled rows.

    Returns:
        The masses of the sampled rows alone.
    """
    lengths = rows.starts.diff().long()
    of_row = torch.repeat_interleave(torch.arange(rows.block_count, device=rows.starts.device), lengths)
    behind = rows.starts[1:].long()[of_row] - 1 - torch.arange(rows.count, device=of_row.device)
    sampled = behind % stride == 0
    some = rows_at(rows.positions[sampled])
    probabilities = causal_scores(query[sampled], key_cache, slots, some, scale=scale).softmax(dim=-1)
    # Columns count to the last row, sampled or not; the last one always is.
    return _masses(probabilities, some)


def _masses(probabilities: torch.Tensor, rows: Rows) -> BlockMass:
    """Block sums of probabilities [H, n, T]."""
    heads, count, _ = probabilities.shape
    columns = rows.last // BLOCK + 1
    seen = probabilities[:, :, : columns * BLOCK]
    padded = torch.nn.functional.pad(seen, (0, columns * BLOCK - seen.shape[2]))
    by_column = padded.view(heads, count, columns, BLOCK).sum(dim=-1)  # [H, n, C]
    lengths = rows.starts.diff()
    of_row = torch.repeat_interleave(torch.arange(rows.block_count, device=lengths.device), lengths.long())
    mass = by_column.new_zeros(heads, rows.block_count, columns).index_add(1, of_row, by_column)
    return BlockMass(mass.float(), rows.blocks, lengths.float())
