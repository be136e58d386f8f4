"""`crossfill models heal` and `choose-layers`: make a smaller model of the whole one again, as its recipe says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossfill.one_line import one_line_errors
from crossfill.progress import bars
from engines.models.prepare import DEFAULT_ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from engines.models.healing.search import Cost, Dropped

Folder = Annotated[
    Path, typer.Option(help="Keeps text, teacher states, checkpoints and the result (2 GB).", file_okay=False)
]
Root = Annotated[Path, typer.Option("--root", help="Folder of prepared models.", file_okay=False)]
Threads = Annotated[int, typer.Option(min=1, help="Cores to use.")]
_FOLDER = Path("var/healing")
# The first two and the last have to stay, whatever the text: without one of them no sentence comes out.
_FIRST_KEPT, _LAST_KEPT = 2, 1


def heal(
    name: Annotated[str, typer.Argument(help="A healed model of the list.")],
    folder: Folder = _FOLDER,
    root: Root = DEFAULT_ROOT,
    threads: Threads = 1,
) -> None:
    """Train a smaller model again (hours); a run that was interrupted goes on where it stopped."""
    with one_line_errors():
        from engines.models.healing.recipes import recipe_of

        # Torch takes seconds to import, and a wrong name needs none.
        recipe = recipe_of(name)
        _check_installed()
        from engines.models.healing.recipe import heal as run

        _use(threads)
        with bars() as progress:
            place = run(name, recipe, root, folder, progress)
    typer.echo(place)


def choose_layers(
    count: Annotated[int, typer.Option(min=1, help="Layers to drop in the largest set.")] = 12,
    folder: Folder = _FOLDER,
    root: Root = DEFAULT_ROOT,
    threads: Threads = 1,
) -> None:
    """Search for the layers of SmolLM2 that change its next tokens least when dropped."""
    from rich.console import Console

    _check_count(count)
    with one_line_errors():
        _check_installed()
        from engines.models.healing import recipe, search
        from engines.models.healing.plan import TextSize

        _use(threads)
        with bars() as progress:
            loaded = recipe.whole_model(root, progress)
            samples = search.samples_of(loaded, recipe.gather(loaded, TextSize(), folder, progress))
            layers = range(_FIRST_KEPT, len(loaded.layers) - _LAST_KEPT)
            single = search.single_costs(samples, layers, progress)
            found = search.drop_greedily(samples, single, count, progress=progress)
    console = Console()
    console.print(_costs("layer", {str(layer): cost for layer, cost in single.items()}))
    console.print(_costs("dropped together", _sets(found)))


def _check_count(count: int) -> None:
    from engines.models.catalogue import SMOLLM2, entry_of

    most = entry_of(SMOLLM2).layers - _FIRST_KEPT - _LAST_KEPT
    if count > most:
        raise typer.BadParameter(f"at most {most} layers can be dropped, got {count}", param_hint="--count")


def _check_installed() -> None:
    from engines.models.loading import import_transformers

    import_transformers("heal a model")


def _sets(found: Sequence[Dropped]) -> dict[str, Cost]:
    return {", ".join(map(str, sorted(one.layers))): one.cost for one in found}


def _costs(label: str, costs: Mapping[str, Cost]) -> Table:
    from rich.table import Table

    table = Table(box=None, title="KL of next tokens to the whole model's, nats", title_justify="left")
    table.add_column(label)
    for column in ("conversations", "prose", "recall", "judged by"):
        table.add_column(column, justify="right")
    for name, cost in costs.items():
        figures = (cost.conversations, cost.prose, cost.recall, cost.total)
        table.add_row(name, *(f"{figure:.3f}" for figure in figures))
    return table


def _use(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
