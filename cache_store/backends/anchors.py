"""One pool of anchors by identity, and which of them goes when it is full."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cache_store.backends.protocol import AnchorPut

OLDEST = 5
"""Of so many oldest anchors the one used least goes (KVCMAS, § Anchor pool)."""


def choose_victim(uses: Mapping[str, int], spared: str) -> str:
    """The anchor to evict, never the spared one; at equal use the older.

    Args:
        uses: of each anchor, the oldest first; at least one beside the spared one.
        spared: the anchor that is being put.
    """
    oldest = [identity for identity in uses if identity != spared][:OLDEST]
    return min(oldest, key=lambda identity: uses[identity])


@dataclass
class Pool:
    """Anchors by identity, the oldest first, and how often each was used."""

    _data: dict[str, bytes] = field(default_factory=dict)
    _uses: dict[str, int] = field(default_factory=dict)

    def anchors(self) -> dict[str, bytes]:
        """A copy."""
        return dict(self._data)

    def use(self, identities: Sequence[str]) -> None:
        """Count one use of each that is here."""
        for identity in identities:
            if identity in self._uses:
                self._uses[identity] += 1

    def drop(self, identity: str) -> bool:
        """Take one away; whether it was here."""
        self._uses.pop(identity, None)
        return self._data.pop(identity, None) is not None

    def put(self, identity: str, data: bytes, capacity: int, budget_bytes: int) -> AnchorPut:
        """Add or replace, and evict others until it fits, as it would alone."""
        self._data[identity] = data
        self._uses.setdefault(identity, 0)
        evicted = []
        while len(self._data) > capacity or sum(map(len, self._data.values())) > budget_bytes:
            victim = choose_victim(self._uses, identity)
            del self._data[victim], self._uses[victim]
            evicted.append(victim)
        return AnchorPut(stored=True, evicted=tuple(evicted))
