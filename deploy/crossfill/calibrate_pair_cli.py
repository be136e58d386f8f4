"""`crossfill calibrate pair`: fit how one model's attention guides another's, and judge whether that will do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossfill.console_table import bare
from crossfill.packages import require_packages
from crossfill.progress import bars
from engines.models.prepare import DEFAULT_ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.calibration.calibration import Calibrated, Wanted
    from engines.reuse.artifact import Manifest


_REPORT, _STEPS = "report.html", "steps"


def pair(
    sender: Annotated[str, typer.Option(help="Model that leaves its masses: of the catalogue, or a folder.")],
    receiver: Annotated[str, typer.Option(help="Model that takes them.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Text, or JSONL of `text` or `messages`, as the service will see; by default Python's own."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the artifact; by default var/pairs/…")] = None,
    tokens: Annotated[int, typer.Option(min=640, help="Of a text to fit by, a multiple of 64.")] = 1024,
    gate_tokens: Annotated[
        int | None, typer.Option(min=1024, help="Of others, a multiple of 64; by default twice as many.")
    ] = None,
    fit: Annotated[int, typer.Option(min=1, help="Texts to fit weights with.")] = 6,
    train_steps: Annotated[int, typer.Option(min=0, help="Steps of training weights end to end; 0 for none.")] = 0,
    maps: Annotated[bool, typer.Option("--maps", help="Try layers by maps, too; they need a block pool.")] = False,
    choice: Annotated[int, typer.Option(min=1, help="Texts to choose by.")] = 3,
    gate: Annotated[int, typer.Option(min=2, help="Texts of each source to judge by.")] = 4,
    needles: Annotated[int, typer.Option(min=2, help="Facts to recall when judging.")] = 40,
    answers: Annotated[int, typer.Option(min=1, help="Greedy answers to judge.")] = 16,
    max_divergence: Annotated[float, typer.Option(min=0, help="KL from the dense run, nats a token.")] = 0.01,
    min_agreement: Annotated[float, typer.Option(min=0, max=1, help="Tokens where both say the same next.")] = 0.95,
    max_recall_lost: Annotated[float, typer.Option(min=0, max=1, help="Facts that guiding may forget.")] = 0.05,
    max_answers_lost: Annotated[
        float, typer.Option(min=0, max=1, help="By which ROUGE-L and F1 of answers may fall.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of texts, facts and random masks.")] = 0,
    models_root: Annotated[Path, typer.Option(help="Where models are made.")] = DEFAULT_ROOT,
) -> None:
    """Find layers, weights and top-p for a pair, and judge it on text that it was not fitted to.

    The artifact is written whatever the verdict; status 1 if the gate refuses the pair. What was ended goes on from
    FOLDER/steps, where results of all steps are kept.
    """
    require_packages("matplotlib")
    gate_tokens = gate_tokens or max(1024, 2 * tokens)
    for name, count in (("--tokens", tokens), ("--gate-tokens", gate_tokens)):
        if count % 64:
            raise typer.BadParameter("is no multiple of 64", param_hint=name)
    from engines.calibration.calibration import Wanted
    from engines.calibration.gate import Limits
    from engines.calibration.outcome import MAP_DENSITIES

    wanted = Wanted(
        tokens=tokens,
        gate_tokens=gate_tokens,
        fit=fit,
        train_steps=train_steps,
        map_densities=MAP_DENSITIES if maps else (),
        choice=choice,
        gate=gate,
        choice_needles=min(needles, Wanted.choice_needles),
        needles=needles,
        answers=answers,
        limits=Limits(max_divergence, min_agreement, max_recall_lost, max_answers_lost),
        seed=seed,
    )
    folders = _folders(sender, receiver, models_root)
    output = output or Path("var/pairs") / "--".join(name for name, _ in folders)
    found = _calibrate(folders, data, wanted, output / _STEPS)
    raise typer.Exit(0 if _tell(found, output) else 1)


def show(
    folder: Annotated[Path, typer.Argument(help="What `crossfill calibrate pair` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="The manifest, for machines.")] = False,
) -> None:
    """What a pair's calibration says; status 1 if its gate refused the pair."""
    from crossfill.pair_calibration.shown import lines, rows

    manifest = _read(folder)
    if as_json:
        typer.echo(json.dumps(manifest.model_dump(mode="json"), indent=2))
    else:
        typer.echo("\n".join(lines(manifest)) + "\n")
        _print(rows({str(folder): manifest}))
    raise typer.Exit(0 if manifest.passed else 1)


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER FOLDER...", help="What calibrations wrote.")],
) -> None:
    """What calibrations say of the same figures, side by side; status 1 if a gate refused one of them."""
    from crossfill.pair_calibration.shown import rows

    if len(folders) < 2:
        raise typer.BadParameter("names one folder, want two at the least", param_hint="FOLDER...")
    manifests = {str(folder): _read(folder) for folder in folders}
    _print(rows(manifests))
    raise typer.Exit(0 if all(manifest.passed for manifest in manifests.values()) else 1)


def _read(folder: Path) -> Manifest:
    from engines.reuse.artifact import read_manifest, read_weights

    manifest = read_manifest(folder)
    # A manifest without its weights is worth nothing.
    read_weights(folder, manifest)
    return manifest


def _print(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console

    Console(highlight=False).print(bare(rows, words=rows[0]))


def _folders(sender: str, receiver: str, models_root: Path) -> tuple[tuple[str, Path], tuple[str, Path]]:
    """Name and folder of each."""
    from crossfill.up import prepare_sources

    folders = {name: Path(folder) for name, folder in prepare_sources([sender, receiver], models_root).items()}
    theirs, own = ((folders[name].resolve().name, folders[name]) for name in (sender, receiver))
    return theirs, own


def _calibrate(
    folders: tuple[tuple[str, Path], tuple[str, Path]], data: Path | None, wanted: Wanted, kept: Path
) -> Calibrated:
    from engines.calibration.calibration import calibrate
    from engines.calibration.texts import built_in, read_sources
    from engines.models.loading import load

    _use_all_cores()
    theirs, own = folders
    sources = built_in() if data is None else read_sources(data, load(own[1]).tokenizer)
    with bars() as progress:
        return calibrate(theirs, own, sources, wanted, kept=kept, progress=progress)


def _tell(found: Calibrated, folder: Path) -> bool:
    """Write the artifact, and show what was found; whether the gate passed."""
    from rich.console import Console

    from crossfill.pair_calibration.report import html_page
    from crossfill.pair_calibration.wording import sentences, tables
    from engines.reuse.artifact import write_artifact

    weights = {layer: matrix.numpy() for layer, matrix in found.weights.items()}
    manifest = write_artifact(folder, found.manifest(_made_by()), weights)
    (folder / _REPORT).write_text(html_page(found), encoding="utf-8")
    console = Console()
    for table in tables(found):
        console.print(table)
    for sentence in sentences(found):
        console.print(sentence, highlight=False)
    typer.echo(f"wrote {folder}\nto look at: {folder / _REPORT}")
    return manifest.passed


def _use_all_cores() -> None:
    import os

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))


def _made_by() -> dict[str, str]:
    from importlib.metadata import version

    from crossfill.machine import describe_machine

    machine = describe_machine()
    return {
        "crossfill": version("crossfill"),
        "torch": version("torch"),
        "command": " ".join(["crossfill", *sys.argv[1:]]),
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        "python": str(machine["python"]),
        "git_revision": str(machine["git_revision"]),
    }
