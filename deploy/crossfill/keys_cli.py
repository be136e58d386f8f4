"""`crossfill keys`: make, list and revoke the API keys of a router."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="API keys of a router.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", help="`auth.keys_file` of the configuration, or `auth.admin_keys_file`.")]


@app.command()
def add(
    tenant: Annotated[
        str, typer.Argument(help="Who the key is for: a tenant, whose keys share a cache, or an operator.")
    ],
    file: File,
    label: Annotated[str, typer.Option(help="What the key is for, in a few words.")] = "",
    admin: Annotated[
        bool, typer.Option("--admin", help="An operator's key, for /admin/; FILE is `auth.admin_keys_file`.")
    ] = False,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    from datetime import datetime

    from crossfill.keys_file import add_key

    key, entry = add_key(file, tenant, label, datetime.now().astimezone().date(), admin=admin)
    typer.echo(key)
    kind = "admin key" if admin else "key"
    typer.echo(f"The {kind} {entry.id} of {tenant} is in {file}, as a hash; it cannot be shown again.", err=True)


@app.command("list")
def list_keys(file: File) -> None:
    """List the keys: tenant, id, date, label."""
    from rich.console import Console
    from rich.table import Table

    from router.tenants.key_file import read_keys

    table = Table(box=None)
    for column in ("tenant", "id", "created", "label"):
        table.add_column(column, overflow="fold")
    for entry in read_keys(file):
        table.add_row(entry.tenant, entry.id, str(entry.created or "-"), entry.label)
    Console(markup=False).print(table)


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")], file: File) -> None:
    """Take a key out; a running router refuses it within two seconds."""
    from crossfill.keys_file import revoke_key

    entry, left = revoke_key(file, key_id)
    typer.echo(f"revoked {entry.id} of {entry.tenant} {entry.label}".rstrip())
    if not left:
        typer.echo(f"No key is left in {file}: nobody may use the router, or its administration, by it.", err=True)
