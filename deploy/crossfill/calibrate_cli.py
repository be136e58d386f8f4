"""`crossfill calibrate`: fit what the service decides by to data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossfill import calibrate_pair_cli
from crossfill.console_table import bare
from crossfill.packages import require_packages
from crossfill.progress import bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crossfill.router_calibration.calibrate import Calibrated

app = typer.Typer(no_args_is_help=True)
app.command()(calibrate_pair_cli.pair)
app.command()(calibrate_pair_cli.show)
app.command()(calibrate_pair_cli.compare)


def _number(value: float) -> float:
    """Typer's ranges take nan: it is neither below the one end nor above the other."""
    if math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


@app.callback()
def group() -> None:
    """Fit to data what the service decides by."""


@app.command()
def router(
    data: Annotated[Path, typer.Option(help="JSONL of a prompt and the score of each model's answer, in [0, 1].")],
    score: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FIELD", help="A model's score is in this field; repeat.")
    ] = None,
    ladder: Annotated[str, typer.Option(help="Models, weakest first: small,large. Default: as in the data.")] = "",
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MODEL", help="What the router calls a model; repeat.")
    ] = None,
    target_large_share: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=0.999,
            callback=_number,
            help="Share of queries for the strongest model; tau is solved for it.",
        ),
    ] = 0.3,
    # Qualities are in [0, 1]: ten times that drowns them.
    sigma: Annotated[float, typer.Option(min=0, max=10, callback=_number, help="Noise of the policy.")] = 0.1,
    holdout: Annotated[
        float, typer.Option(min=0.05, max=0.95, callback=_number, help="Share of prompts kept for judging.")
    ] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the folds and the resampling.")] = 0,
    output: Annotated[Path, typer.Option(help="The scorer's file.", dir_okay=False)] = Path("router-scorer.json"),
    report: Annotated[Path | None, typer.Option(help="Also write an HTML report here.", dir_okay=False)] = None,
) -> None:
    """Fit the learned scorer, judge it on held-out queries, and solve tau for a share of large calls."""
    fields, names = _pairs(score, "--score"), _pairs(model, "--model")
    _require_different_files({"--data": data, "--output": output, "--report": report})
    require_packages("sklearn", "matplotlib")
    from rich.console import Console

    from crossfill.router_calibration.calibrate import Wanted, calibrate
    from crossfill.router_calibration.data import read_scored_prompts
    from crossfill.router_calibration.wording import conclusions, model_rows, routing_rows

    wanted_ladder = tuple(name.strip() for name in ladder.split(",") if name.strip())
    read = read_scored_prompts(data, fields, wanted_ladder)
    _check_names(names, read.prompts.ladder)
    with bars() as progress:
        result = calibrate(read, Wanted(target_large_share, sigma, holdout, seed), progress)
    console = Console()
    console.print(bare(model_rows(result)), bare(routing_rows(result)), sep="\n")
    for sentence in conclusions(result):
        console.print(sentence)
    _write(result, names, output, report)


def _pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given or ():
        name, separator, value = text.partition("=")
        if not (separator and name and value):
            raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE", param_hint=option)
        if name in pairs:
            raise typer.BadParameter(f"{name!r} is there twice", param_hint=option)
        pairs[name] = value
    return pairs


def _require_different_files(files: dict[str, Path | None]) -> None:
    """Whatever way they are written: none of them may be overwritten by another."""
    seen: list[tuple[str, Path]] = []
    for option, file in files.items():
        if file is None:
            continue
        for other, path in seen:
            if _same_file(file, path):
                raise typer.BadParameter(f"{file} is the file of {other} too", param_hint=option)
        seen.append((option, file))


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        # One of them is not there yet.
        return one.resolve() == other.resolve()


def _check_names(names: dict[str, str], ladder: Sequence[str]) -> None:
    from router.config.values import check_model_name

    for name in names:
        if name not in ladder:
            raise typer.BadParameter(f"{name!r} is not in the ladder ({', '.join(ladder)})", param_hint="--model")
    called = [names.get(name, name) for name in ladder]
    for name in called:
        try:
            check_model_name(name)
        except ValueError as error:
            raise typer.BadParameter(f"{error}. NAME=MODEL renames one", param_hint="--model") from error
    if len(set(called)) < len(called):
        raise typer.BadParameter(f"two models get one name: {', '.join(called)}", param_hint="--model")


def _write(result: Calibrated, names: dict[str, str], output: Path, report: Path | None) -> None:
    """Write the files, and print the part of a configuration that uses them."""
    import yaml

    from crossfill.errors import CalibrationError
    from crossfill.router_calibration.artifact import artifact_of
    from crossfill.router_calibration.report import html_page

    artifact = artifact_of(result, names)
    texts = {output: artifact.model_dump_json(indent=1) + "\n"}
    if report is not None:
        texts[report] = html_page(result)
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CalibrationError(f"{path}: cannot be written: {error.strerror}") from error
        typer.echo(f"wrote {path}")
    routing = {
        "ladder": artifact.routing["ladder"],
        "tau": result.tau,
        "sigma": result.wanted.sigma,
        "scorer": {"kind": "learned", "path": str(output.absolute())},
    }
    typer.echo("\n" + yaml.safe_dump({"routing": routing}, sort_keys=False, default_flow_style=None), nl=False)
