"""Why a prefill is dense."""

from enum import StrEnum


class Refusal(StrEnum):
    """Why a prefill is dense; a metric's label and part of the worker's response header."""

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

    @property
    def mode(self) -> str:
        """`none` where nothing could be expected; `fallback` where there was something and it was not used."""
        return "fallback" if self in _FALLBACKS else "none"


_FALLBACKS = frozenset(
    {
        Refusal.TOO_DENSE,
        Refusal.STORE_SLOW,
        Refusal.STORE_BUSY,
        Refusal.STORE_UNAVAILABLE,
        Refusal.MALFORMED,
        Refusal.FAILED,
    }
)
