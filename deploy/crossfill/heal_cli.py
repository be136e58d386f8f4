"""`crossfill models heal`: train a smaller model of the catalogue from the whole one, as its recipe says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crossfill.progress import bars


def heal(
    name: Annotated[str, typer.Argument(help="A healed model of the list.")],
    folder: Annotated[
        Path, typer.Option(help="Keeps text, checkpoints and the result (2 GB).", file_okay=False)
    ] = Path("var/healing"),
    root: Annotated[Path, typer.Option(help="Folder of prepared models.", file_okay=False)] = Path("var/models"),
    threads: Annotated[int, typer.Option(min=1, help="Cores to use.")] = 1,
) -> None:
    """Train a smaller model again (one to two hours on two cores); an interrupted run goes on where it stopped."""
    import torch

    from engines.models.errors import ModelError
    from engines.models.healing.recipe import heal as run
    from engines.models.healing.recipes import recipe_of

    torch.set_num_threads(threads)
    try:
        with bars() as progress:
            place = run(name, recipe_of(name), root, folder, progress)
    except ModelError as error:
        typer.secho(f"crossfill: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from error
    typer.echo(place)
