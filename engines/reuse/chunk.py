"""The rows of one request in one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossfill_kernels.blocks import BlockMass
    from crossfill_kernels.rows import Rows
    from crossfill_kernels.slots import Slots
    from engines.reuse.map_records import StoredMap
    from engines.reuse.map_sender import CopiedLayer
    from engines.reuse.plan import Plan, Run


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one request in one chunk that are computed alike.

    Attributes:
        run: their positions.
        rows: the same, as kernels take them.
        captured: whether their masses are wanted.
    """

    run: Run
    rows: Rows
    captured: bool = False


@dataclass
class Chunk:
    """The rows of one request in a forward pass.

    Attributes:
        rows: all of them.
        slots: of the request's positions up to the last of them.
        parts: in the order of their positions.
        masses: of the rows whose masses are wanted, by layer; filled while layers are computed.
        copies: of layers whose maps are wanted, what they were computed from; filled likewise.
        maps: by layer, of parts by number, what was found to compute them by; filled likewise.
    """

    request_id: str
    rows: Rows
    slots: Slots
    parts: tuple[Part, ...]
    plan: Plan | None
    is_last: bool
    masses: dict[int, BlockMass] = field(default_factory=dict)
    copies: dict[int, CopiedLayer] = field(default_factory=dict)
    maps: dict[int, dict[int, StoredMap]] = field(default_factory=dict)

    def place(self, part: Part) -> slice:
        """Of a part's rows among all of the chunk's."""
        first = self.parts[0].run.start
        return slice(part.run.start - first, part.run.stop - first)
