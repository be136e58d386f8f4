"""What a worker made of state that others left: its header `x-crossfill-reuse`, read and made safe to repeat."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from router.config.values import check_model_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.errors import JsonObject

REUSE_HEADER = "x-crossfill-reuse"
"""As in `guided; blocks=33/34; density=0.48; sender=large` or `none; reason=nothing_stored`."""

LONGEST_HEADER = 512
"""Characters of it that are read and repeated."""

_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")
_BLOCKS = re.compile(r"([0-9]{1,9})/([0-9]{1,9})", re.ASCII)
_HOPS = re.compile(r"[1-9][0-9]{0,2}", re.ASCII)
_SHARE = re.compile(r"[01](?:\.[0-9]{1,9})?", re.ASCII)


class ReuseMode(StrEnum):
    """How a prompt was prefilled; `fallback`: there was something to reuse, and it was not used."""

    NONE = "none"
    GUIDED = "guided"
    MAP = "map"
    CORRECTED = "corrected"
    FALLBACK = "fallback"


class ReuseReason(StrEnum):
    """Why nothing was reused, in the workers' words; `other` is a word that is none of them."""

    OFF = "off"
    NO_ROUTER = "no_router"
    NO_PAIR = "no_pair"
    GATE_FAILED = "gate_failed"
    ARTIFACT_MISMATCH = "artifact_mismatch"
    ARTIFACT_UNUSABLE = "artifact_unusable"
    DRIFTED = "drifted"
    UNSUPPORTED = "unsupported"
    TOO_SHORT = "too_short"
    NOTHING_STORED = "nothing_stored"
    CACHED = "cached"
    RETRACTED = "retracted"
    WEIGHTS_CHANGED = "weights_changed"
    TOO_LITTLE = "too_little"
    TOO_DENSE = "too_dense"
    STORE_SLOW = "store_slow"
    STORE_BUSY = "store_busy"
    STORE_UNAVAILABLE = "store_unavailable"
    MALFORMED = "malformed"
    FAILED = "failed"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Blocks of 64 rows of a prompt: how many were guided, of how many in all."""

    guided: int
    prompt: int

    def to_json(self) -> JsonObject:
        """For logs and clients."""
        return {"guided": self.guided, "prompt": self.prompt}


@dataclass(frozen=True, slots=True)
class ReuseOutcome:
    """What a worker said of one answer; whatever it did not say, or said in a way that is not understood, is None.

    `header` are its own words, printable ASCII and at most LONGEST_HEADER long; empty if it said nothing at all, as
    workers without reuse do. `density` is the share of attention blocks that were computed, `sender` the model whose
    state was used. `prefix_hops` is how many reuses lie between an exact computation and what the worker had in its own
    cache of the prompt; None if that was exact.
    """

    header: str = ""
    mode: ReuseMode = ReuseMode.NONE
    reason: ReuseReason | None = None
    row_blocks: RowBlocks | None = None
    density: float | None = None
    sender: str | None = None
    prefix_hops: int | None = None

    def to_json(self) -> JsonObject:
        """For clients: the mode, and what else was said."""
        told: JsonObject = {
            "mode": self.mode.value,
            "reason": self.reason.value if self.reason else None,
            "row_blocks": self.row_blocks.to_json() if self.row_blocks else None,
            "density": self.density,
            "sender": self.sender,
            "prefix_hops": self.prefix_hops,
        }
        return {name: value for name, value in told.items() if value is not None}


NOTHING_SAID = ReuseOutcome()


def reuse_outcome(headers: Iterable[tuple[str, str]]) -> ReuseOutcome:
    """What the headers of a worker's answer say; of several such headers the first counts. Never raises."""
    said = next((value for name, value in headers if name.lower() == REUSE_HEADER), "")
    header = _bounded(said)
    if not header:
        return NOTHING_SAID
    mode, *pairs = header.split(";")
    values: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        values.setdefault(name.strip(), value.strip())
    return ReuseOutcome(
        header,
        _mode(mode.strip()),
        _reason(values.get("reason", "")),
        _row_blocks(values.get("blocks", "")),
        _density(values.get("density", "")),
        _sender(values.get("sender", "")),
        _hops(values.get("prefix_hops", "")),
    )


def _bounded(said: str) -> str:
    """Its beginning, cut between two pairs where there are any, since half a value would be another one."""
    header = _NOT_PRINTABLE.sub("?", said.strip()[: LONGEST_HEADER + 1])
    if len(header) <= LONGEST_HEADER:
        return header
    whole_pairs, semicolon, _ = header.rpartition(";")
    return whole_pairs.strip() if semicolon else header[:LONGEST_HEADER]


def _mode(word: str) -> ReuseMode:
    return ReuseMode(word) if word in list(ReuseMode) else ReuseMode.NONE


def _reason(word: str) -> ReuseReason | None:
    if not word:
        return None
    return ReuseReason(word) if word in list(ReuseReason) else ReuseReason.OTHER


def _row_blocks(text: str) -> RowBlocks | None:
    found = _BLOCKS.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        return None
    return RowBlocks(int(found[1]), int(found[2]))


def _density(text: str) -> float | None:
    return share if _SHARE.fullmatch(text) and (share := float(text)) <= 1 else None


def _hops(text: str) -> int | None:
    return int(text) if _HOPS.fullmatch(text) else None


def _sender(text: str) -> str | None:
    try:
        return check_model_name(text)
    except ValueError:
        return None
