"""`crossfill bench`: measurements on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from engines.models.prepare import DEFAULT_ROOT

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure on this machine."""


@app.command()
def worker(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models of the catalogue; the demo pair by default.")
    ] = None,
    models_root: Annotated[Path, typer.Option(help="Where models are made.")] = DEFAULT_ROOT,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "256,1000,2000,4000",
    output: Annotated[Path | None, typer.Option(help="Also write the results as JSON.")] = None,
) -> None:
    """Start-up time, prefill and decode speed, prefix-cache hits and memory of a real SGLang worker."""
    from rich.console import Console

    from crossfill.bench_worker import DEMO_PAIR, bench_workers

    bench_workers(
        models or list(DEMO_PAIR),
        models_root=models_root,
        lengths=[int(part) for part in lengths.split(",")],
        output=output,
        console=Console(),
    )
