"""A mirror of who holds which prefixes, in memory: a radix tree over the keys of pages, with path compression.

A run of pages that nothing branches off from is one node, whose label is its keys side by side; so a page costs its 16
bytes and a share of a node. A node and its only child become one again when nothing tells them apart: the same holders,
and next to each other in the order of use. Since keys are chained, a page's key stands for the whole prefix: nodes are
found by the key of their first page in one table, and a label is compared with bisection, whatever the size of the
tree.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache_store.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# A node beside its keys, measured with tracemalloc on CPython 3.11: 140 to 203 bytes by how full the table is, the most
# while it grows, and up to 36 for a number of holders' bits. The budget holds at every moment.
NODE_BYTES = 240

# A removal looks at so many nodes at once, which takes less than 1 ms, and then waits for long enough that another
# thread gets the lock: Python's locks are not fair. Fewer would make it slow beside a busy thread, from which it gets
# the interpreter back after 5 ms.
_NODES_AT_ONCE = 4000
_PAUSE_S = 1e-4


@dataclass(frozen=True)
class HeldPages:
    """Who holds how much of a prefix.

    Attributes:
        by_holder: pages from the first on, of each holder that has any.
    """

    by_holder: Mapping[str, int] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Pages that the best holder has."""
        return max(self.by_holder.values(), default=0)


class _Node:
    """A run of pages. `holders` is a set of bits, and never has one that the parent lacks, but for a retired one.

    Linked to its parent, and to its neighbours in the order of use.
    """

    __slots__ = ("children", "holders", "keys", "newer", "older", "parent")

    def __init__(self, keys: bytes, parent: _Node | None, holders: int) -> None:
        self.keys = keys
        self.parent = parent
        self.holders = holders
        self.children = 0
        self.newer = self.older = self

    @property
    def pages(self) -> int:
        return len(self.keys) // KEY_BYTES


class RadixMirror:
    """Which of several holders (workers, replicas) hold which pages; at most about `budget_bytes` of memory.

    When it is full, the leaf that was inserted or confirmed least recently goes, from its end. Safe to use from several
    threads. It is a hint: keys that collide end a prefix early and do no harm.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        # Held for all of a removal, so that there is one at a time.
        self._removal = threading.Lock()
        self._nodes: dict[bytes, _Node] = {}
        # Has neither pages nor a place in the tree; its neighbours are the newest and the oldest node.
        self._root = _Node(b"", None, 0)
        self._bits: dict[str, int] = {}
        self._pages = 0
        # The bit of a holder that is being removed, and the next node to take it from (after the newest, the root).
        self._retired = 0
        self._cursor = self._root

    @property
    def pages(self) -> int:
        """Pages in the tree."""
        return self._pages

    @property
    def size_bytes(self) -> int:
        """What counts towards the budget."""
        return KEY_BYTES * self._pages + NODE_BYTES * len(self._nodes)

    def match(self, keys: Sequence[bytes]) -> HeldPages:
        """Who holds how many pages of this prefix. Changes nothing, not even the order of eviction."""
        path = b"".join(keys)
        with self._lock:
            held: dict[int, int] = {}
            # -1 has every bit, and `_bits` names none of a negative number: nobody is told of before the first page.
            node, depth, holders = self._root, 0, -1
            while (child := self._child(node, path, depth)) is not None:
                common = _common_pages(child.keys, path, depth)
                left, holders = holders & ~child.holders, holders & child.holders
                held |= dict.fromkeys(_bits(left), depth)
                depth += common
                node = child
                if common < child.pages:
                    break
            held |= dict.fromkeys(_bits(holders), depth)
            return HeldPages({name: held[bit] for name, bit in self._bits.items() if bit in held})

    def insert(self, holder: str, keys: Sequence[bytes]) -> int:
        """`holder` has all of this prefix now; how many pages had to be forgotten for it."""
        path = b"".join(keys)
        with self._lock:
            bit = self._bit(holder)
            found, depth = self._descend(path)
            for node in found:
                node.holders = node.holders & ~self._retired | bit
            rest = path[depth * KEY_BYTES :]
            # A key that is a node elsewhere in the tree is a collision, here and where a node is to be cut.
            if rest and rest[:KEY_BYTES] not in self._nodes:
                self._append(found, rest, bit)
            # Deepest first, so that a node is always older than its parent and the oldest one a leaf.
            for node in reversed(found):
                self._touch(node)
                self._join(node)
            return self._shrink()

    def remove(self, holder: str) -> int:
        """Forget a holder, such as a worker that was restarted; how many pages nobody holds any more.

        Takes time in proportion to the number of nodes. Lookups know nothing of the holder from the first moment on and
        wait for a small part of the work at most; what the holder inserts meanwhile counts.
        """
        with self._removal:
            with self._lock:
                self._retired = self._bits.pop(holder, 0)
                # What is inserted or confirmed from now on has no retired bit, so it need not be met.
                self._cursor, left = self._root.newer, len(self._nodes) if self._retired else 0
            forgotten = 0
            while left > 0 and self._cursor is not self._root:
                with self._lock:
                    forgotten += self._retire(min(left, _NODES_AT_ONCE))
                left -= _NODES_AT_ONCE
                time.sleep(_PAUSE_S)
            with self._lock:
                self._retired, self._cursor = 0, self._root
            return forgotten

    def _retire(self, nodes: int) -> int:
        """Take the retired bit from the next nodes; how many pages nobody holds any more."""
        before = self._pages
        # Oldest first meets children before their parents.
        for _ in range(nodes):
            node = self._cursor
            if node is self._root:
                break
            # At once, as the node may go.
            self._cursor = node.newer
            if not node.holders & self._retired:
                continue
            node.holders ^= self._retired
            if node.holders:
                self._join(node)
                self._join(node.newer)
            else:
                self._drop(node)
        return before - self._pages

    def _bit(self, holder: str) -> int:
        if holder not in self._bits:
            used = sum(self._bits.values()) | self._retired
            # The lowest bit that nobody has.
            self._bits[holder] = ~used & (used + 1)
        return self._bits[holder]

    def _child(self, node: _Node, path: bytes, depth: int) -> _Node | None:
        child = self._nodes.get(path[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])
        return child if child is not None and child.parent is node else None

    def _descend(self, path: bytes) -> tuple[list[_Node], int]:
        """The nodes of the known part of `path`, the last one cut where the paths part, and how many pages that is."""
        found: list[_Node] = []
        node, depth = self._root, 0
        while (child := self._child(node, path, depth)) is not None:
            common = _common_pages(child.keys, path, depth)
            if common < child.pages:
                if child.keys[common * KEY_BYTES : (common + 1) * KEY_BYTES] in self._nodes:
                    break
                child = self._split(child, common)
            node = child
            found.append(node)
            depth += common
        return found, depth

    def _split(self, lower: _Node, pages: int) -> _Node:
        """Cut the first `pages` off a node, as a new one above it; `lower` keeps its place in the order of use."""
        cut = pages * KEY_BYTES
        upper = _Node(lower.keys[:cut], lower.parent, lower.holders)
        upper.children = 1
        lower.keys, lower.parent = lower.keys[cut:], upper
        self._nodes[upper.keys[:KEY_BYTES]] = upper
        self._nodes[lower.keys[:KEY_BYTES]] = lower
        return upper

    def _append(self, found: list[_Node], rest: bytes, bit: int) -> None:
        self._pages += len(rest) // KEY_BYTES
        last = found[-1] if found else self._root
        if found and not last.children and last.holders == bit:
            # A conversation that grows stays one node.
            last.keys += rest
            return
        leaf = _Node(rest, last, bit)
        last.children += 1
        self._nodes[rest[:KEY_BYTES]] = leaf
        found.append(leaf)

    def _shrink(self) -> int:
        before = self._pages
        while (over := self.size_bytes - self._budget_bytes) > 0:
            leaf = self._root.newer
            pages = -(-over // KEY_BYTES)
            if pages < leaf.pages:
                leaf.keys = leaf.keys[: -pages * KEY_BYTES]
                self._pages -= pages
            else:
                self._drop(leaf)
        return before - self._pages

    def _drop(self, leaf: _Node) -> None:
        assert leaf is not self._root, "an empty tree is within every budget"
        assert leaf.parent is not None, "every node but the root has a parent"
        assert not leaf.children, "children are older than their parents, so they go first"
        leaf.parent.children -= 1
        del self._nodes[leaf.keys[:KEY_BYTES]]
        self._pages -= leaf.pages
        self._unlink(leaf)
        self._join(leaf.parent)

    def _join(self, upper: _Node) -> None:
        """Make a node and its only child one, unless their holders differ or something was used in between."""
        lower = upper.older
        if lower.parent is not upper or upper.children != 1 or lower.holders != upper.holders:
            return
        del self._nodes[lower.keys[:KEY_BYTES]]
        self._nodes[upper.keys[:KEY_BYTES]] = lower
        lower.keys, lower.parent = upper.keys + lower.keys, upper.parent
        self._unlink(upper)

    def _unlink(self, node: _Node) -> None:
        """Take it out of the order of use; its neighbours are next to each other then."""
        if self._cursor is node:
            self._cursor = node.newer
        node.older.newer, node.newer.older = node.newer, node.older
        self._join(node.newer)

    def _touch(self, node: _Node) -> None:
        """Make it the newest. The order is a ring: newer than the newest, and older than the oldest, is the root."""
        self._unlink(node)
        newest = self._root.older
        node.older, node.newer = newest, self._root
        newest.newer = self._root.older = node


def _common_pages(label: bytes, path: bytes, depth: int) -> int:
    """How many pages of `label` are those of `path` from page `depth` on. At least its first one is."""
    start = depth * KEY_BYTES
    if path.startswith(label, start):
        return len(label) // KEY_BYTES
    most = min(len(label), len(path) - start) // KEY_BYTES

    def parts(page: int) -> bool:
        at = page * KEY_BYTES
        return label[at : at + KEY_BYTES] != path[start + at : start + at + KEY_BYTES]

    # Keys are chained: once two paths part they never meet.
    return bisect_left(range(most), True, key=parts)


def _bits(holders: int) -> Iterator[int]:
    while holders > 0:
        bit = holders & -holders
        yield bit
        holders ^= bit
