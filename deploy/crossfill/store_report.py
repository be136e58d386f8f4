"""What `crossfill store` shows: tables for people, JSON for machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from cache_store.errors import RecordRefusedError
from cache_store.records import decode_any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.table import Table

    from cache_store.backends.protocol import BackendStats, PageWrite, Reclaimed, ScopeInfo
    from crossfill.store_work import Exported, Fault, Imported, Verified

# Enough to tell pages apart; --key takes it as it is.
_SHOWN_KEY = 12
# Columns to copy from, which a narrow terminal must not break.
_WHOLE = ("page", "parent", "record", "namespace")


def show_json(value: object) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2))


def size(size_bytes: int) -> str:
    """Bytes as people read them, in units of 1024."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def stats_json(stats: BackendStats) -> dict[str, Any]:
    """The statistics; sizes in bytes."""
    return {
        "size_bytes": stats.size_bytes,
        "pages": sum(scope.pages for scope in stats.scopes),
        "leased_pages": stats.leased_pages,
        "quarantined": stats.quarantined,
        "namespaces": [
            {**_info_json(scope.info), "epoch": scope.epoch, "pages": scope.pages, "size_bytes": scope.size_bytes}
            for scope in stats.scopes
        ],
    }


def show_stats(stats: BackendStats) -> None:
    """A row for each namespace, and the whole."""
    table = _table("tenant", "model", "revision", "namespace", right=("epoch", "pages", "size"))
    for scope in sorted(stats.scopes, key=lambda scope: -scope.size_bytes):
        table.add_row(*_info_cells(scope.info), str(scope.epoch), str(scope.pages), size(scope.size_bytes))
    _print(table)
    pages = sum(scope.pages for scope in stats.scopes)
    typer.echo(
        f"{pages} pages, {size(stats.size_bytes)}, {stats.leased_pages} pages leased, "
        f"{stats.quarantined} records quarantined so far"
    )


def pages_json(pages: Sequence[tuple[ScopeInfo, PageWrite]], *, with_records: bool) -> list[dict[str, Any]]:
    """Pages, and their records' headers if wanted."""
    return [_page_json(info, page, with_records) for info, page in pages]


def show_pages(pages: Sequence[tuple[ScopeInfo, PageWrite]], *, with_records: bool) -> None:
    """A row for each page, or for each record."""
    if with_records:
        table = _table("page", "record", "shape", "dtype", "provenance", "hops", "state", right=("size",))
        for _, page in pages:
            for name, data in page.records.items():
                table.add_row(page.key.hex(), name, *_record_cells(data), size(len(data)))
    else:
        table = _table("page", "parent", "tenant", "model", "revision", "namespace", right=("records", "size"))
        for info, page in pages:
            keys = page.key.hex()[:_SHOWN_KEY], "-" if page.parent == info.scope else page.parent.hex()[:_SHOWN_KEY]
            table.add_row(*keys, *_info_cells(info), str(len(page.records)), size(_page_bytes(page)))
    _print(table)
    if not pages:
        typer.echo("no page fits", err=True)


def faults_json(result: Verified) -> dict[str, Any]:
    """What was verified, and each fault."""
    faults = [
        {
            **_info_json(fault.info),
            "page": fault.key.hex(),
            "record": fault.name,
            "fault": fault.fault.value,
            "removed": fault.removed,
        }
        for fault in result.faults
    ]
    return {"pages": result.pages, "records": result.records, "size_bytes": result.size_bytes, "faults": faults}


def show_faults(result: Verified) -> None:
    """A row for each fault, if there is one, and what was verified."""
    if result.faults:
        table = _table("page", "record", "tenant", "model", "revision", "namespace", "what is wrong")
        for fault in result.faults:
            table.add_row(fault.key.hex()[:_SHOWN_KEY], fault.name, *_info_cells(fault.info), _wrong(fault))
        _print(table)
    typer.echo(
        f"{result.records} records of {result.pages} pages ({size(result.size_bytes)}), {len(result.faults)} of them "
        f"refused"
    )


def show_reclaimed(done: str, reclaimed: Reclaimed, *, as_json: bool) -> None:
    """What a flush, an eviction or a compaction took away."""
    if as_json:
        show_json({"pages": reclaimed.pages, "size_bytes": reclaimed.size_bytes})
    else:
        typer.echo(f"{done}: {reclaimed.pages} pages, {size(reclaimed.size_bytes)}")


def show_export(file: Path, result: Exported, *, as_json: bool) -> None:
    """What an export wrote and left out."""
    left_out = {fault.value: count for fault, count in result.left_out.items()}
    if as_json:
        show_json({"pages": result.pages, "left_out": left_out})
        return
    typer.echo(f"{result.pages} pages are in {file}")
    if left_out:
        typer.echo(f"records left out: {_counts(left_out)}; see `crossfill store verify`", err=True)


def show_import(file: Path, result: Imported, *, as_json: bool) -> None:
    """What the store took of a file."""
    refused = {reason.value: count for reason, count in result.refused.items()}
    left_out = {fault.value: count for fault, count in result.left_out.items()}
    if as_json:
        fields = {"pages": result.pages, "size_bytes": result.size_bytes, "evicted_pages": result.evicted_pages}
        show_json({**fields, "refused": refused, "left_out": left_out})
        return
    typer.echo(f"{result.pages} pages of {file} ({size(result.size_bytes)}) are in the store")
    if result.evicted_pages:
        typer.echo(f"{result.evicted_pages} pages had to go for them", err=True)
    if refused:
        typer.echo(f"pages refused: {_counts(refused)}", err=True)
    if left_out:
        typer.echo(f"records left out, as they are not what they should be: {_counts(left_out)}", err=True)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in _WHOLE)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    # What goes into a pipe or a file has no edge to be folded at.
    width = None if console.is_terminal else max(console.width, console.measure(table).maximum)
    console.print(table, width=width, no_wrap=width is not None, crop=False)


def _info_json(info: ScopeInfo) -> dict[str, str]:
    return {
        "namespace": info.scope.hex(),
        "tenant": info.tenant,
        "model": info.model,
        "revision": info.revision,
    }


def _info_cells(info: ScopeInfo) -> tuple[str, ...]:
    return info.tenant, info.model, info.revision[:_SHOWN_KEY], info.scope.hex()[:_SHOWN_KEY]


def _page_bytes(page: PageWrite) -> int:
    return sum(map(len, page.records.values()))


def _page_json(info: ScopeInfo, page: PageWrite, with_records: bool) -> dict[str, Any]:
    records: list[Any] = [
        {"name": name, "size_bytes": len(data), **(_record_json(data) if with_records else {})}
        for name, data in page.records.items()
    ]
    keys = {"page": page.key.hex(), "parent": page.parent.hex(), "tokens_digest": page.tokens_digest.hex()}
    return {**_info_json(info), **keys, "size_bytes": _page_bytes(page), "records": records}


def _record_json(data: bytes) -> dict[str, Any]:
    try:
        record = decode_any(data)
    except RecordRefusedError as error:
        return {"fault": error.fault.value}
    return {
        "kind": record.kind.name.lower(),
        "layer": record.layer,
        "shape": list(record.shape),
        "dtype": record.dtype,
        "provenance": record.provenance.name.lower(),
        "hops": record.hops,
        "tokens_digest": record.tokens_digest.hex(),
    }


def _record_cells(data: bytes) -> tuple[str, ...]:
    found = _record_json(data)
    if "fault" in found:
        return "-", "-", "-", "-", f"refused: {found['fault']}"
    shape = " × ".join(map(str, found["shape"])) or "scalar"
    return shape, found["dtype"], found["provenance"], str(found["hops"]), "intact"


def _wrong(fault: Fault) -> str:
    return f"{fault.detail}{' (taken away)' if fault.removed else ''}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
