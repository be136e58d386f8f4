"""How every cached key and value came to be: SGLang's prefix cache cannot tell exact from approximate."""

from __future__ import annotations

import torch


class Provenance:
    """Hops of every slot of the KV pool: 0 is exact, n that n reuses lie between it and an exact computation.

    A row attends to all rows before it, so what follows an approximate row is approximate itself, however it is
    computed. The slots of one prefix may come from several requests, whose prefix cache SGLang joins, so it is the
    greatest number of a prefix that counts.

    Args:
        slots: of the pool.
    """

    def __init__(self, slots: int) -> None:
        self._hops = torch.zeros(slots, dtype=torch.uint8)

    def hops_of(self, slots: torch.Tensor) -> int:
        """Of a prefix that stands in these slots; 0 for none."""
        return int(self._hops[slots].max()) if slots.numel() else 0

    def extend(self, slots: torch.Tensor, before: int, guided_from: int | None) -> None:
        """New rows stand in these slots.

        Args:
            slots: [n], in the order of their positions.
            before: hops of the prefix before them.
            guided_from: index of the first row computed from others' exact state; None if all rows looked everywhere.
        """
        self._hops[slots] = before
        if guided_from is not None:
            self._hops[slots[guided_from:]] = max(before, 1)

    def decode(self, slots: torch.Tensor, previous: torch.Tensor) -> None:
        """One new row a request stands in `slots` [n], after the rows in `previous` [n]."""
        self._hops[slots] = self._hops[previous]
