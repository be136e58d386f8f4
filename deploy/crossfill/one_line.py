"""Errors of models as one line on standard error and status 1, for commands that also run without the whole program."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from engines.models.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command if a `ModelError` comes out of the block."""
    try:
        yield
    except ModelError as error:
        typer.secho(f"crossfill: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from error
