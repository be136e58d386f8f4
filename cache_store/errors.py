"""Errors of the store.

StoreError
├── StoreUrlError          the operator must correct a store's URL or settings (also a ValueError)
├── StoreUnavailableError  the store is down, hung or broken; the caller goes on without it
├── StoreFullError         nothing can be evicted to make room; what was to be written is dropped
├── StoreVersionError      another version of Crossfill wrote this store; the operator must flush or upgrade it
├── ForeignProcessError    an embedded store is opened from where its locks do not reach (another PID namespace)
└── RecordRefusedError     a record is not what it should be: truncated, altered, of another version or of other tokens
"""

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


class StoreVersionError(StoreError):
    """The store's layout is that of another version."""


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


class RecordRefusedError(StoreError):
    """A record must not be used.

    Attributes:
        fault: what is wrong with it.
    """

    def __init__(self, fault: RecordFault, detail: str) -> None:
        super().__init__(f"record refused ({fault}): {detail}")
        self.fault = fault
