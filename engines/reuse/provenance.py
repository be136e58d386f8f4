"""How every cached key and value came to be: SGLang's prefix cache cannot tell exact from approximate."""

from __future__ import annotations

import torch


class Provenance:
    """Hops of every slot of the KV pool: 0 is exact, n that n reuses lie between it and an exact computation.

    A row attends to all rows before it, so along a prompt hops never fall: what follows an approximate row is
    approximate itself, however it is computed.

    Args:
        slots: of the pool.
    """

    def __init__(self, slots: int) -> None:
        self._hops = torch.zeros(slots, dtype=torch.uint8)

    def hops_of(self, slot: int) -> int:
        """Of the prefix that ends in this slot."""
        return int(self._hops[slot])

    def extend(self, slots: torch.Tensor, before: int, guided_from: int | None, hops: int = 1) -> None:
        """New rows stand in these slots.

        Args:
            slots: [n], in the order of their positions.
            before: hops of the prefix before them.
            guided_from: index of the first row computed from others' state; None if all were computed from all rows.
            hops: of such rows.
        """
        self._hops[slots] = before
        if guided_from is not None:
            self._hops[slots[guided_from:]] = min(255, max(before, hops))

    def decode(self, slots: torch.Tensor, previous: torch.Tensor) -> None:
        """One new row a request stands in `slots` [n], after the rows in `previous` [n]."""
        self._hops[slots] = self._hops[previous]

    def reset(self) -> None:
        """The pool was emptied."""
        self._hops.zero_()
