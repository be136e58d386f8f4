"""Errors of the store.

StoreError
├── StoreUrlError          the operator must correct a store's URL or settings (also a ValueError)
├── StoreUnavailableError  the store is down, hung or broken; the caller goes on without it
├── StoreFullError         nothing can be evicted to make room; what was to be written is dropped
│   └── PoolRefusedError   … of a block pool, with the reason
├── StaleHandlesError      slots of a block pool were given to somebody else; what was read of them must not be used
├── StoreVersionError      another version of Crossfill wrote this store; the operator deletes it or uses that version
├── ExportFileError        a file to import is not what an export wrote; nothing of it is used
├── ForeignProcessError    an embedded store is opened from where its locks do not reach (another PID namespace)
└── RecordRefusedError     a record is not what it should be: truncated, altered, of another version or of other tokens
"""

from collections.abc import Mapping
from enum import StrEnum


class StoreError(Exception):
    """Base of every error raised by `cache_store`. The text is one readable line without secrets."""


class StoreUrlError(StoreError, ValueError):
    """A URL or setting of a store is wrong."""


class StoreUnavailableError(StoreError):
    """The store did not do what was asked: connection refused, deadline passed, server error.

    Attributes:
        reason: a short label for metrics, such as `refused`, `timeout` or `server`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreFullError(StoreError):
    """There is no room and nothing that may be evicted."""


class PoolRefusedError(StoreFullError):
    """A block pool did not give the slots that were asked for; none of them is taken.

    Attributes:
        reason: a short label for metrics (`cache_store.pool.protocol.PoolRefusal`).
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class StaleHandlesError(StoreError):
    """Slots of a block pool no longer hold what their handles stand for. Whatever was read or computed is void.

    Attributes:
        reasons: number of handles by reason (`cache_store.pool.protocol.Staleness`).
    """

    def __init__(self, reasons: Mapping[str, int], handles: int) -> None:
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        super().__init__(f"stale, of {handles} slots: {listed}; compute without them")
        self.reasons = dict(reasons)


class StoreVersionError(StoreError):
    """The store's layout is that of another version."""


class ExportFileError(StoreError):
    """A file cannot be exported to, or is not what an export wrote. The text begins with its path."""


class ForeignProcessError(StoreError):
    """This process cannot share the embedded store's locks with those that have it open."""


class RecordFault(StrEnum):
    """What is wrong with a record; a metric's label."""

    TRUNCATED = "truncated"
    CHECKSUM = "checksum"
    VERSION = "version"
    KIND = "kind"
    TOKENS = "tokens"
    LAYER = "layer"
    SHARD = "shard"


class RecordRefusedError(StoreError):
    """A record must not be used.

    Attributes:
        fault: what is wrong with it.
    """

    def __init__(self, fault: RecordFault, detail: str) -> None:
        super().__init__(f"record refused ({fault}): {detail}")
        self.fault = fault
