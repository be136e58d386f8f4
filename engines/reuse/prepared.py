"""What a receiver makes of one sender layer's records as they come, before its turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.reuse.guided import bytes_of

if TYPE_CHECKING:
    from engines.reuse.guided import GuidedLayers
    from engines.reuse.map_records import StoredMap


@dataclass(frozen=True)
class Prepared:
    """Of one sender layer.

    Attributes:
        guided: what its masses make receiver layers look at.
        map: its kept attention, which lies in a block pool; None if none is wanted, was left, or can be read.
    """

    guided: GuidedLayers
    map: StoredMap | None = None

    @property
    def size_bytes(self) -> int:
        """Of all lists; the blocks themselves are the pool's."""
        return bytes_of(self.guided) + (self.map.size_bytes if self.map else 0)
