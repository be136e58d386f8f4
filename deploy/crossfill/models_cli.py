"""`crossfill models`: list and make the models that Crossfill can make here, and measure how good they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossfill.heal_cli import choose_layers, heal
from crossfill.one_line import one_line_errors
from crossfill.progress import Bars, bars
from engines.models.errors import ModelError
from engines.models.prepare import DEFAULT_ROOT

if TYPE_CHECKING:
    from engines.models.loading import LoadedModel
    from engines.models.progress import Progress

# Everything heavy is imported inside the commands: `crossfill --help` is quick, and works without torch.
app = typer.Typer(help="Models that Crossfill can make on this machine.", no_args_is_help=True)

Root = Annotated[Path, typer.Option("--root", help="Folder of prepared models.", file_okay=False)]
Target = Annotated[str, typer.Argument(metavar="NAME_OR_PATH", help="A model of the list, or the folder of one.")]
_DEFAULT_MODEL = "smollm2-135m-instruct"
_SUMMARY_COLUMNS = 115


@app.command("list")
def list_models(root: Root = DEFAULT_ROOT) -> None:
    """List the models, and which of them are here."""
    from rich.console import Console
    from rich.table import Table

    from engines.models.catalogue import CATALOGUE

    console, table = Console(), Table(box=None)
    table.add_column("name", no_wrap=True)
    for column in ("parameters", "layers", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("prepared", no_wrap=True)
    table.add_column("licence", no_wrap=True)
    # The one column that a narrow terminal can spare.
    with_summary = console.width >= _SUMMARY_COLUMNS
    if with_summary:
        table.add_column("what")
    for entry in CATALOGUE.values():
        numbers = (f"{entry.parameters / 1e6:.1f} M", str(entry.layers), f"{entry.size_bytes / 1e6:.0f} MB")
        summary = (entry.summary,) if with_summary else ()
        table.add_row(entry.name, *numbers, _state(entry.name, root), entry.license, *summary)
    console.print(table)


@app.command()
def serving(
    url: Annotated[str, typer.Argument(help="The router.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(envvar="CROSSFILL_API_KEY", help="API key, if it asks for one.")] = None,
) -> None:
    """Ask a running router for its models and workers; status 1 if no worker can be used."""
    from rich.console import Console
    from rich.table import Table

    from crossfill.serving import ask_router

    found = ask_router(url, key)
    table = Table(box=None)
    for column in ("model", "worker", "state"):
        table.add_column(column, overflow="fold")
    table.add_column("in flight", justify="right")
    for worker in found.workers:
        table.add_row(worker.model, worker.id, worker.state, str(worker.in_flight))
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"{found.status}; models: {', '.join(found.names)}", soft_wrap=True)
    raise typer.Exit(1 if found.status == "unavailable" else 0)


def _state(name: str, root: Path) -> str:
    from engines.models.prepare import check_prepared

    if not (root / name).exists():
        return "no"
    try:
        check_prepared(name, root)
    except ModelError:
        return "damaged"
    return "yes"


@app.command("prepare")
def prepare_models(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Models of the list.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="The models of the demo.")] = False,
    root: Root = DEFAULT_ROOT,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file of a model that is here again.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build anew and replace a model that is here.")] = False,
) -> None:
    """Make models: download or compute, convert, check the digests. Does nothing for those that are here."""
    from engines.models.catalogue import DEMO, entry_of
    from engines.models.prepare import prepare

    wanted = [*(DEMO if demo else ()), *(names or ())]
    if not wanted:
        raise typer.BadParameter("say which models, or --demo", param_hint="NAME")
    with one_line_errors():
        # A typing error in the last name should not show after the first model's download.
        for name in wanted:
            entry_of(name)
        with bars() as progress:
            folders = [prepare(name, root, verify=verify, rebuild=rebuild, progress=progress) for name in wanted]
    for folder in folders:
        typer.echo(folder)


@app.command()
def influence(
    model: Target = _DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of calibration prose.")] = 2048,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Show each layer's block influence: how much it changes the hidden state."""
    from engines.models import report, texts
    from engines.models.influence import block_influence
    from engines.models.perplexity import encode

    with one_line_errors(), bars() as progress:
        loaded = _load(model, root, progress)
        ids = encode(loaded, texts.prose(texts.Part.CALIBRATION), tokens)
        values = block_influence(loaded, ids, progress=progress)
    for line in report.influence_lines(values):
        typer.echo(line)


@app.command()
def perplexity(
    model: Target = _DEFAULT_MODEL,
    drop: Annotated[str, typer.Option(help="Layers to leave out, numbered from 0, for example 3,7.")] = "",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of held-out prose.")] = 2048,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Perplexity on held-out prose and on held-out answers in chat format."""
    from engines.models import perplexity as measure
    from engines.models import texts

    layers = _layers(drop)
    with one_line_errors(), bars() as progress:
        loaded = _load(model, root, progress)
        ids = measure.encode(loaded, texts.prose(texts.Part.HELDOUT), tokens)
        with measure.without_layers(loaded, layers) as rest:
            prose = measure.perplexity(rest, ids, progress=progress)
            chat = measure.answer_perplexity(rest, texts.dialogues(texts.Part.HELDOUT, 8))
    typer.echo(f"prose         {prose.value:10.2f}  ({prose.tokens} tokens)")
    typer.echo(f"chat answers  {chat.value:10.2f}  ({chat.tokens} tokens)")


@app.command("prune-table")
def prune_table(model: Target = _DEFAULT_MODEL, root: Root = DEFAULT_ROOT) -> None:
    """Measure which layers can be dropped, as Markdown on standard output (minutes; see deploy/models/README.md)."""
    from engines.models import report
    from engines.models.study import StudySize, study

    size = StudySize()
    with one_line_errors(), bars() as progress:
        loaded = _load(model, root, progress)
        result = study(loaded, size, progress=progress)
    typer.echo(report.markdown(result, size), nl=False)


@app.command()
def judge(
    models: Annotated[list[str], typer.Argument(metavar="NAME_OR_PATH...", help="The first one is the reference.")],
    needles: Annotated[int, typer.Option(min=0, help="Facts to find in long texts; 0 leaves them out.")] = 40,
    # The most that the catalogue's models have positions for.
    tokens: Annotated[
        int, typer.Option(min=150, max=8192, help="Tokens of a text with a fact, question included.")
    ] = 1000,
    questions: Annotated[bool, typer.Option("--questions/--no-questions", help="Ask easy questions.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all of it here, with every answer.", dir_okay=False)
    ] = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Judge models side by side: perplexity, facts found in long texts, easy questions (minutes for each)."""
    import json

    from rich.console import Console

    from crossfill.models_judgement import as_json, table
    from engines.models import judge as judging

    if len(set(models)) < len(models):
        raise typer.BadParameter("name each model once", param_hint="NAME_OR_PATH")
    if json_file is not None:
        _check_writable(json_file)
    size = judging.JudgeSize(needles=needles, needle_tokens=tokens)
    if not questions:
        size = replace(size, questions=0)
    judged = []
    with one_line_errors(), bars() as progress:
        folders = [_folder(model, root, progress) for model in models]
        judging.check_same_tokens(folders)
        for model, folder in zip(models, folders, strict=True):
            judged.append(judging.judge(_loaded(folder, progress), model, size, progress=_of(model, progress)))
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(judged, size), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    Console(markup=False, highlight=False).print(table(judged))


def _check_writable(file: Path) -> None:
    """An answer after minutes should find its place."""
    try:
        new = not file.exists()
        with file.open("a"):
            pass
        if new:
            file.unlink()
    except OSError as error:
        raise typer.BadParameter(f"cannot write {file}: {error.strerror}", param_hint="--json") from error


def _of(model: str, progress: Bars) -> Progress:
    """Stages named after their model: each has bars of its own."""

    def report(stage: str, done: int, total: int | None) -> None:
        progress(f"{Path(model).name}: {stage}", done, total)

    return report


app.command("choose-layers")(choose_layers)
app.command()(heal)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of layer numbers such as 3,7", param_hint="--drop") from error


def _load(model: str, root: Path, progress: Bars) -> LoadedModel:
    return _loaded(_folder(model, root, progress), progress)


def _folder(model: str, root: Path, progress: Bars) -> Path:
    from engines.models.catalogue import CATALOGUE, entry_of
    from engines.models.prepare import prepare

    if model not in CATALOGUE and Path(model).is_dir():
        return Path(model)
    return prepare(entry_of(model).name, root, progress=progress)


def _loaded(folder: Path, progress: Bars) -> LoadedModel:
    from engines.models.loading import load

    progress("loading the model", 0, None)
    return load(folder)
