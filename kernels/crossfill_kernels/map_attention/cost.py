"""Which form of map attention costs least, by counts of the work that each does."""

from dataclasses import dataclass

import torch

from crossfill_kernels.blocks import PackedMap
from crossfill_kernels.map_attention.arguments import Form

# Costs as shares of one product of a 64 × 64 block by 64 values, which takes 5.6 µs on one thread of an AMD EPYC with
# AVX-512. Fitted there to 36 cases of three forms each: 9, 12, 14 or 16 sender heads, 4 … 16 receiver heads, 3 … 8 KV
# heads, d 64 or 128, density .1 … .3, union .12 … .82, one to all sender heads mixed, three storages, 2,048 or 4,096
# tokens. The choice was the fastest form in 28 of them; it took 1.09 times as long at worst, 1.01 times on average.
TERM_OF_GROUP = 0.007
"""A stored block in the mixture of one receiver head, the group's heads mixed together."""
TERM_ALONE = 0.035
"""The same, each head mixed by itself."""
READ = 0.03
"""A stored block made ready to be multiplied as it is."""


@dataclass(frozen=True)
class Work:
    """Counts of one call's work.

    A group is the receiver heads of one KV head; a position is a (row block, column block).

    Attributes:
        dim: head dimension of the receiver.
        mixed: (receiver head, position) pairs for which a sender head of any weight in the head's group keeps the
            position; n·u for n receiver heads and a union u, if no weight is zero.
        products: those for which a sender head of nonzero weight in the head itself does.
        kept: (stored block, KV head) pairs with a weight in the group; m·ρ·n_v for m sender heads of density ρ and
            n_v KV heads, if no weight is zero.
        terms: (stored block, receiver head) pairs with a nonzero weight.
        group: receiver heads of a group.
    """

    dim: int
    mixed: int
    products: int
    kept: int
    terms: int
    group: int


def count_work(packed: PackedMap, row_blocks: torch.Tensor, weights: torch.Tensor, kv_heads: int, dim: int) -> Work:
    """Count the work of some row blocks of a map; waits for a GPU.

    Args:
        packed: the map.
        row_blocks: int64 [R], the row blocks of the map that are computed.
        weights: float32 [H_S, H_R].
        kv_heads: the receiver's KV heads.
        dim: its head dimension.
    """
    senders, receivers = weights.shape
    lengths = packed.offsets.diff().long()
    chosen = torch.zeros(lengths.numel(), dtype=torch.bool, device=lengths.device)
    chosen[row_blocks] = True
    row = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    mine = chosen[row]
    columns = packed.columns[mine].long()
    head = columns % senders
    # Entries of a position stand side by side.
    position = torch.unique_consecutive((row[mine] << 32) | (columns // senders), return_inverse=True)[1]
    present = torch.zeros(int(position[-1]) + 1 if position.numel() else 0, senders, device=weights.device)
    present[position, head] = 1
    nonzero = (weights != 0).float()  # [H_S, H_R]
    grouped = nonzero.view(senders, kv_heads, -1).amax(dim=2)  # [H_S, H_kv]
    group = receivers // kv_heads
    return Work(
        dim=dim,
        mixed=group * int(((present @ grouped) > 0).sum()),
        products=int(((present @ nonzero) > 0).sum()),
        kept=int(grouped.sum(dim=1)[head].sum()),
        terms=int(nonzero.sum(dim=1)[head].sum()),
        group=group,
    )


def costs(work: Work) -> dict[Form, float]:
    """What each form costs. `paper` is not among them: it does the work of `mix` and shares none of it."""
    product = work.dim / 64
    return {
        "mix": work.mixed * product + work.kept * work.group * TERM_OF_GROUP,
        "values_first": work.kept * (product + READ),
        "sparse": work.products * product + work.terms * TERM_ALONE,
    }


def choose_form(work: Work) -> Form:
    """The form that costs least; the first of `costs` where several cost the same."""
    cost = costs(work)
    return min(cost, key=lambda form: cost[form])
