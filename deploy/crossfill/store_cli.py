"""`crossfill store`: look into a store, check it, make room in it, and carry its pages elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossfill.progress import bars

if TYPE_CHECKING:
    from cache_store.backends.protocol import Backend

app = typer.Typer(help="The store of attention state.", no_args_is_help=True)

# Above any that a request would wait: these commands may work through all of a store.
_DEADLINE_S = 60.0
# More than any store holds, and a number that every backend computes with exactly.
_NO_BUDGET_BYTES = 2**50

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="CROSSFILL_STORE_URL",
        help="Such as lmdb:///folder or redis://host:port/0; by default the folder var/store.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant's.")]
Model = Annotated[str | None, typer.Option(help="Only of this model.")]
Revision = Annotated[str | None, typer.Option(help="Only of these weights: their digest, or how it begins.")]


@app.command()
def stats(url: Url = None, as_json: AsJson = False) -> None:
    """What each namespace holds."""
    from crossfill.store_report import show_json, show_stats, stats_json

    with _opened(url) as backend:
        found = backend.stats()
    if as_json:
        show_json(stats_json(found))
    else:
        show_stats(found)


@app.command()
def inspect(
    key: Annotated[str, typer.Option(help="Pages whose key begins so, with their records; hexadecimal.")] = "",
    tenant: Tenant = None,
    model: Model = None,
    revision: Revision = None,
    limit: Annotated[int, typer.Option(min=1, help="Most pages shown.")] = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List pages, or the records of one; slow on a large store."""
    from itertools import islice

    from crossfill.store_report import pages_json, show_json, show_pages

    if key.strip("0123456789abcdefABCDEF"):
        raise typer.BadParameter("a key is hexadecimal", param_hint="--key")
    with _opened(url) as backend:
        wanted = {"tenant": tenant, "model": model, "revision": _whole(backend, revision)}
        fitting = (
            (info, page)
            for info, page in backend.scan()
            if page.key.hex().startswith(key.lower())
            and all(value in {None, getattr(info, name)} for name, value in wanted.items())
        )
        pages = list(islice(fitting, limit))
    if as_json:
        show_json(pages_json(pages, with_records=bool(key)))
    else:
        show_pages(pages, with_records=bool(key))


@app.command()
def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Take away the records that are refused.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Read every record and check it; status 1 if one is not what it should be."""
    from crossfill.store_report import faults_json, show_faults, show_json
    from crossfill.store_work import verify_all

    with _opened(url) as backend, bars() as progress:
        result = verify_all(backend, repair=repair, progress=progress)
    if as_json:
        show_json(faults_json(result))
    else:
        show_faults(result)
    raise typer.Exit(1 if result.faults else 0)


@app.command()
def flush(
    tenant: Tenant = None,
    model: Model = None,
    revision: Revision = None,
    everything: Annotated[bool, typer.Option("--all", help="All of it.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make what fits all that is given a miss, at once and for everybody."""
    from crossfill.store_report import show_reclaimed

    wanted = {"tenant": tenant, "model": model, "revision": revision}
    if everything == any(value is not None for value in wanted.values()):
        raise typer.BadParameter("say what to flush, or --all", param_hint="--tenant, --model, --revision")
    with _opened(url) as backend:
        wanted["revision"] = _whole(backend, revision)
        show_reclaimed("flushed", backend.flush(**wanted), as_json=as_json)


@app.command()
def evict(
    size: Annotated[str, typer.Argument(help="How much to free, such as 512MiB; flushed pages go first.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Free so much, the least recently used first."""
    from crossfill.store_report import show_reclaimed

    size_bytes = _size_bytes(size)
    with _opened(url) as backend:
        show_reclaimed("evicted", backend.evict(size_bytes), as_json=as_json)


@app.command()
def compact(url: Url = None, as_json: AsJson = False) -> None:
    """Give space that is free back to the system, where the store can."""
    from crossfill.store_report import show_reclaimed

    with _opened(url) as backend:
        show_reclaimed("given back", backend.compact(), as_json=as_json)


@app.command("export")
def export_pages(
    file: Annotated[Path, typer.Argument(dir_okay=False, help="Compressed if its name ends in .zst.")],
    tenant: Tenant = None,
    model: Model = None,
    revision: Revision = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write pages to a file; records that are not what they should be are left out."""
    from crossfill.store_report import show_export
    from crossfill.store_work import export_all

    wanted = {"tenant": tenant, "model": model, "revision": revision}
    with _opened(url) as backend, bars() as progress:
        result = export_all(backend, file, wanted, progress=progress)
    show_export(file, result, as_json=as_json)


@app.command("import")
def import_pages(
    file: Annotated[Path, typer.Argument(dir_okay=False, help="Written by export.")],
    budget: Annotated[
        str | None, typer.Option(help="Most that the store may hold then; by default nothing is evicted.")
    ] = None,
    tenant_budget: Annotated[str | None, typer.Option(help="Most that one tenant may hold; all by default.")] = None,
    tenant: Tenant = None,
    model: Model = None,
    revision: Revision = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Read pages from a file into a store, after all of the file was found right; status 1 if one was refused.

    Import only what you trust: a file can claim to be any tenant's, and what it holds is served to that tenant.
    """
    from cache_store.backends.protocol import Limits
    from crossfill.store_report import show_import
    from crossfill.store_work import check_import, import_all

    budget_bytes = _size_bytes(budget) if budget else _NO_BUDGET_BYTES
    limits = Limits(budget_bytes, _size_bytes(tenant_budget) if tenant_budget else budget_bytes)
    wanted = {"tenant": tenant, "model": model, "revision": revision}
    with bars() as progress:
        # Before a store is made for it.
        checked = check_import(file, wanted, progress=progress)
        with _opened(url, make=True) as backend:
            result = import_all(backend, checked, limits, progress=progress)
    show_import(file, result, as_json=as_json)
    raise typer.Exit(1 if result.refused else 0)


@contextmanager
def _opened(url: str | None, *, make: bool = False) -> Iterator["Backend"]:
    """The store at `url`; only `make` lets an embedded one be made."""
    from cache_store.backends.opening import open_backend
    from cache_store.config import default_url, is_unmade
    from cache_store.errors import StoreUrlError

    url = url or default_url()
    if not make and is_unmade(url):
        raise StoreUrlError(f"{url}: there is no store; say where it is by --url or CROSSFILL_STORE_URL")
    backend = open_backend(url, deadline_s=_DEADLINE_S)
    try:
        yield backend
    finally:
        backend.close()


def _whole(backend: "Backend", revision: str | None) -> str | None:
    """The one revision in the store that begins so; as it is, if it is there itself or nothing begins so."""
    # Of an empty variable of a script everything would begin so.
    if not revision:
        return revision
    revisions = {scope.info.revision for scope in backend.stats().scopes}
    begun = sorted(one for one in revisions if one.startswith(revision))
    if len(begun) > 1 and revision not in begun:
        raise typer.BadParameter(f"{revision!r} begins several: {', '.join(begun)}", param_hint="--revision")
    return begun[0] if begun and revision not in begun else revision


def _size_bytes(text: str) -> int:
    from pydantic import TypeAdapter, ValidationError

    from cache_store.sizes import SizeBytes

    try:
        return int(TypeAdapter(SizeBytes).validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
