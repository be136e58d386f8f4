"""`crossfill config`: check configuration files, show what they come to, describe what they may hold."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Configuration files of `up` and `serve`.", no_args_is_help=True)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of a stack or a router.")],
) -> None:
    """Check files, and the files that they name; status 1 if one has a fault."""
    from crossfill.config_file import check_files, check_pairs, kind_of, load_any
    from crossfill.errors import StartError
    from router.errors import ConfigError

    faults = 0
    for file in files:
        try:
            config = load_any(file)
            check_files(config)
            check_pairs(config)
        except (ConfigError, StartError) as error:
            faults += 1
            # A pair has no line: both models can be read, and do not fit each other.
            where = f"{file}: " if isinstance(error, StartError) else ""
            typer.echo(f"crossfill: {where}{error}", err=True)
        else:
            count = len(config.models)
            typer.echo(f"{file}: ok ({kind_of(config)}, {count} {'model' if count == 1 else 'models'})")
    raise typer.Exit(1 if faults else 0)


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A file of a stack or a router.")]) -> None:
    """Print the whole configuration as YAML, defaults filled in and paths made absolute."""
    import yaml

    from crossfill.config_file import effective, load_any

    typer.echo(yaml.safe_dump(effective(load_any(file)), sort_keys=False, allow_unicode=True), nl=False)


@app.command()
def schema(
    kind: Annotated[Literal["stack", "router"], typer.Option(help="`stack` for `up`, `router` for `serve`.")] = "stack",
) -> None:
    """Print the JSON Schema of a file, for editors that check while you write."""
    import json

    from crossfill.config_file import schema_of

    typer.echo(json.dumps(schema_of(kind), indent=2))
