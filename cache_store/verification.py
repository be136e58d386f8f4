"""Whether what is stored is what it should be, found without anybody having asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache_store.errors import RecordFault, RecordRefusedError
from cache_store.records import decode_any

if TYPE_CHECKING:
    from cache_store.backends.protocol import PageWrite


def faults_of(page: PageWrite) -> dict[str, RecordRefusedError]:
    """What is wrong with the records of a page, by name; those that are right are left out."""
    faults = {}
    for name, data in page.records.items():
        try:
            _check(page, name, data)
        except RecordRefusedError as error:
            faults[name] = error
    return faults


def _check(page: PageWrite, name: str, data: bytes) -> None:
    record = decode_any(data)
    if record.name != name:
        raise RecordRefusedError(RecordFault.KIND, f"it is {record.name}, stored as {name}")
    if record.tokens_digest != page.tokens_digest:
        raise RecordRefusedError(RecordFault.TOKENS, "it belongs to other tokens")
