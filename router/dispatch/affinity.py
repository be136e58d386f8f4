"""Which of a model's workers gets a request: the one that holds its prefix, unless load forbids."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.config import AffinityConfig
    from router.dispatch.workers import Worker
    from router.errors import JsonObject
    from router.sessions.prefix_mirror import PrefixMatch
    from router.sessions.prompt import Prompt


class PlacementReason(StrEnum):
    """Why a worker was chosen. All but `prefix` mean the least in flight.

    `balance`: those that hold the prefix have too much in flight. `shared`: only a prefix that many conversations
    share lies anywhere. `no_match`: too little lies anywhere.
    """

    PREFIX = "prefix"
    BALANCE = "balance"
    SHARED = "shared"
    NO_MATCH = "no_match"
    ONLY_ONE = "only_one"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Placement:
    """A chosen worker, and how many of the prompt's blocks it holds."""

    worker: Worker
    reason: PlacementReason
    matched_blocks: int = 0
    prompt_blocks: int = 0

    def to_json(self) -> JsonObject:
        """For the access log."""
        return {"reason": self.reason.value, "blocks": self.matched_blocks, "of": self.prompt_blocks}

    def to_header(self) -> str:
        """As in `reason=prefix, blocks=8, of=11`."""
        return f"reason={self.reason.value}, blocks={self.matched_blocks}, of={self.prompt_blocks}"


def place(workers: Sequence[Worker], prompt: Prompt, config: AffinityConfig) -> Placement:
    """Choose from `workers`, of which there is at least one; among equals the first is taken.

    A conversation returns to the worker that holds its latest turn. A new one goes where at least `min_share` of its
    blocks lie, but not for a prefix that everybody uses: that one is worth having on every worker. Neither goes to a
    worker that has more than `margin` requests in flight above the least.
    """
    idlest = min(workers, key=lambda worker: worker.in_flight)
    if not config.enabled:
        return Placement(idlest, PlacementReason.OFF)
    matches = {worker: worker.prefixes.match(prompt) for worker in workers}
    worker, reason = _choose(matches, idlest, len(prompt.blocks), config)
    return Placement(worker, reason, matches[worker].blocks, len(prompt.blocks))


def _choose(
    matches: dict[Worker, PrefixMatch], idlest: Worker, prompt_blocks: int, config: AffinityConfig
) -> tuple[Worker, PlacementReason]:
    if len(matches) == 1:
        return idlest, PlacementReason.ONLY_ONE
    deepest = max(match.blocks for match in matches.values())
    is_shared = any(match.is_shared for match in matches.values() if match.blocks == deepest)
    least_blocks = max(1, config.min_share * prompt_blocks)
    holders = [
        worker for worker, match in matches.items() if match.turns or (match.blocks >= least_blocks and not is_shared)
    ]
    if not holders:
        is_long = deepest >= least_blocks
        return idlest, PlacementReason.SHARED if is_long else PlacementReason.NO_MATCH
    near = [worker for worker in holders if worker.in_flight <= idlest.in_flight + config.margin]
    if not near:
        return idlest, PlacementReason.BALANCE
    best = max(near, key=lambda worker: (matches[worker].turns, matches[worker].blocks, -worker.in_flight))
    return best, PlacementReason.PREFIX
