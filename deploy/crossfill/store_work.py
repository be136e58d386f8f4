"""What `crossfill store` does with all pages of a store: verify, export, import."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache_store.backends.protocol import PageWrite
from cache_store.export_file import read_export, write_export
from cache_store.verification import faults_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from cache_store.backends.protocol import Backend, Limits, Refusal, ScopeInfo
    from cache_store.errors import RecordFault

    Progress = Callable[[str, int, int | None], None]
    Page = tuple[ScopeInfo, PageWrite]

_BATCH_BYTES = 8 * 2**20
# A bar that moves more often than anybody looks costs more than the work.
_TELL_EVERY = 64


@dataclass(frozen=True)
class Fault:
    """A record that must not be used; `removed` if it was taken away for it."""

    info: ScopeInfo
    key: bytes
    name: str
    fault: RecordFault
    detail: str
    removed: bool


@dataclass(frozen=True)
class Verified:
    """What was read, and what of it is not right."""

    pages: int
    records: int
    size_bytes: int
    faults: Sequence[Fault]


@dataclass(frozen=True)
class Exported:
    """Pages that were written, and records that were left out, by what is wrong with them."""

    pages: int
    left_out: Mapping[RecordFault, int]


@dataclass(frozen=True)
class Checked:
    """A file to import of which every frame was found right, and what of it is wanted (tenant, model)."""

    file: Path
    wanted: Mapping[str, str | None]
    pages: int


@dataclass(frozen=True)
class Imported:
    """Pages that the store took, those that it refused, what had to go for them, and records that were left out."""

    pages: int
    size_bytes: int
    refused: Mapping[Refusal, int]
    evicted_pages: int
    left_out: Mapping[RecordFault, int]


def verify_all(backend: Backend, *, repair: bool, progress: Progress) -> Verified:
    """Read every record and check it; with `repair`, quarantine those that are refused.

    Raises:
        StoreUnavailableError: the store stopped answering.
    """
    pages = records = size_bytes = 0
    faults = []
    for info, page in _told("verify", backend.scan(), _pages_in(backend), progress):
        pages += 1
        records += len(page.records)
        size_bytes += sum(map(len, page.records.values()))
        for name, error in faults_of(page).items():
            faults.append(Fault(info, page.key, name, error.fault, str(error), removed=repair))
    if repair:
        # After the scan, which may hold what a change would wait for.
        for fault in faults:
            backend.quarantine(fault.info.scope, fault.key, fault.name)
    return Verified(pages, records, size_bytes, faults)


def export_all(backend: Backend, file: Path, wanted: Mapping[str, str | None], *, progress: Progress) -> Exported:
    """Write the pages of all namespaces that fit `wanted` (tenant, model, revision) to `file`.

    Raises:
        ExportFileError: the file cannot be written.
        StoreUnavailableError: the store stopped answering; the file is as it was.
    """
    left_out: Counter[RecordFault] = Counter()

    def sound() -> Iterator[Page]:
        for info, page in _told("export", backend.scan(), _pages_in(backend), progress):
            if _fits(info, wanted):
                yield info, _intact(page, left_out)

    return Exported(write_export(file, sound()), left_out)


def check_import(file: Path, wanted: Mapping[str, str | None], *, progress: Progress) -> Checked:
    """Read all of `file` and no store.

    Raises:
        ExportFileError: the file is not what an export wrote.
    """
    return Checked(file, wanted, sum(1 for _ in _told("check", read_export(file), None, progress)))


def import_all(backend: Backend, checked: Checked, limits: Limits, *, progress: Progress) -> Imported:
    """Publish the wanted pages of a file. Records that are not what they should be are left out, as by an export.

    Raises:
        ExportFileError: the file was changed since it was checked; pages before that are in the store.
        StoreUnavailableError: the store stopped answering; pages before that are in it.
    """
    left_out: Counter[RecordFault] = Counter()

    def sound() -> Iterator[Page]:
        for info, page in _told("import", read_export(checked.file), checked.pages, progress):
            if _fits(info, checked.wanted):
                yield info, _intact(page, left_out)

    pages = size_bytes = evicted = 0
    refused: Counter[Refusal] = Counter()
    for info, batch in _batches(sound()):
        published = backend.publish(info, batch, limits)
        pages += published.pages
        size_bytes += published.size_bytes
        evicted += published.evicted_pages
        refused.update(published.refused)
    return Imported(pages, size_bytes, refused, evicted, left_out)


def _fits(info: ScopeInfo, wanted: Mapping[str, str | None]) -> bool:
    return all(value in {None, getattr(info, name)} for name, value in wanted.items())


def _intact(page: PageWrite, left_out: Counter[RecordFault]) -> PageWrite:
    """The page without the records that are refused, which are counted."""
    faults = faults_of(page)
    left_out.update(error.fault for error in faults.values())
    records = {name: data for name, data in page.records.items() if name not in faults}
    return PageWrite(page.key, page.parent, page.tokens_digest, records)


def _batches(pages: Iterator[Page]) -> Iterator[tuple[ScopeInfo, list[PageWrite]]]:
    """Pages that follow each other, of one namespace, by a few megabytes."""
    batch: list[PageWrite] = []
    of, size_bytes = None, 0
    for info, page in pages:
        if of is not None and (info != of or size_bytes > _BATCH_BYTES):
            yield of, batch
            batch, size_bytes = [], 0
        of = info
        batch.append(page)
        size_bytes += sum(map(len, page.records.values()))
    if of is not None:
        yield of, batch


def _pages_in(backend: Backend) -> int:
    return sum(scope.pages for scope in backend.stats().scopes)


def _told(stage: str, pages: Iterator[Page], total: int | None, progress: Progress) -> Iterator[Page]:
    done = 0
    for done, page in enumerate(pages, 1):
        if done % _TELL_EVERY == 0:
            # Others may be publishing meanwhile.
            progress(stage, done, max(done, total) if total is not None else None)
        yield page
    # Nothing at all is done too.
    progress(stage, max(done, 1), max(done, 1))
