"""A conversation in which two models take turns: what the receiver computes guided, and where it answers.

The receiver begins, so it gives the even answers; before answer number n, counted from 0, there were n switches. What
the sender leaves is the state of what it prefilled: all up to the end of the question that it answered last. What the
receiver has computed stays as it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfill_kernels.rows import BLOCK

SWITCHES = (4, 8)
"""After which quality is judged."""

# Turns are so many but for the second one, which has the other half of the text: what the sender is asked about.
_SHORT = 16


@dataclass(frozen=True)
class Talk:
    """Turns of a text, the second half of each of which is the answer, but for the long one.

    Attributes:
        tokens: of all turns.
    """

    tokens: int

    @property
    def _turn(self) -> int:
        return self.tokens // _SHORT

    def _end(self, turn: int) -> int:
        return self._turn if turn == 0 else self.tokens - (max(SWITCHES) - turn) * self._turn

    def answer(self, turn: int) -> range:
        """Positions of the answer of turn number `turn`, counted from 0: after so many switches."""
        return range(self._end(turn) - self._turn // 2, self._end(turn))

    @property
    def pages(self) -> frozenset[int]:
        """Row blocks that the receiver computes guided.

        The row block in which its own cache ends counts as a whole, of which it computes only the rest.
        """
        found: set[int] = set()
        for turn in range(2, max(SWITCHES) + 1, 2):
            found.update(range(self._end(turn - 2) // BLOCK, self.answer(turn - 1).start // BLOCK))
        return frozenset(found)
