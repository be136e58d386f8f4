"""`crossfill route`: the decision for a text, without a service; every model counts as healthy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from router.config import RouterConfig
    from router.decision.policy import Decision


def route(
    text: Annotated[str, typer.Argument(help="What the user says; - reads standard input.")],
    config: Annotated[Path, typer.Option(help="YAML file of a stack or of a router.")] = Path("deploy/demo.yaml"),
    model: Annotated[str, typer.Option(help="The model that the request asks for.")] = "auto",
    request_id: Annotated[str | None, typer.Option(help="Seed of the noise; a new one by default.")] = None,
    system: Annotated[str | None, typer.Option(help="A system turn before the text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The decision as JSON, as /v1/route returns it.")] = False,
) -> None:
    """Show which model a text would go to and why, as if every model were healthy. Sends nothing."""
    from router.request import ids

    _check_request_id(request_id)
    if text == "-":
        text = sys.stdin.read()
    decision = _decide(_router_config(config), model, text, system, request_id or ids.request_id(ids.random_hex()))
    if as_json:
        typer.echo(json.dumps(decision.to_json(), indent=1))
        return
    from rich.console import Console

    for line in _summary(decision):
        typer.echo(line)
    if decision.ladder:
        Console().print(_table(decision))


def _check_request_id(given: str | None) -> None:
    """The service gives a request with another id a new one, and then decides by that."""
    from router.request.ids import ID_RULE, is_id

    if given is not None and not is_id(given):
        raise typer.BadParameter(f"takes {ID_RULE}", param_hint="--request-id")


def _router_config(path: Path) -> RouterConfig:
    from crossfill.config import StackConfig
    from crossfill.config_file import load_any

    config = load_any(path)
    return config.outline() if isinstance(config, StackConfig) else config


def _decide(config: RouterConfig, model: str, text: str, system: str | None, request_id: str) -> Decision:
    from router.decision.decider import Decider, build_scorer
    from router.errors import ClientError
    from router.request.generation import parse_chat

    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        chat = parse_chat({"model": model, "messages": messages}, config.limits)
        return Decider(config, build_scorer(config.routing)).prepare(chat, request_id)(())
    except ClientError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error


def _summary(decision: Decision) -> list[str]:
    rows = [
        ("model", decision.model),
        ("reason", decision.reason.value),
        ("request id", decision.request_id),
        ("tau", ", ".join(map(str, decision.tau)) if isinstance(decision.tau, tuple) else str(decision.tau)),
        ("sigma", str(decision.sigma)),
        ("scorer", decision.scorer),
        ("fallback", decision.fallback),
        ("difficulty", None if decision.difficulty is None else f"{decision.difficulty:.3f}"),
        ("cost weight", str(decision.cost_weight) if decision.cost_weight else None),
    ]
    shown = rows if decision.ladder else rows[:3]
    return [f"{name:<12}{value}" for name, value in shown if value is not None]


def _table(decision: Decision) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("ladder")
    columns = {"quality": decision.scores, "noise": decision.noise, "expected cost": decision.cost}
    known = {title: values for title, values in columns.items() if values}
    for title in known:
        table.add_column(title, justify="right")
    for name in decision.ladder:
        table.add_row(name, *(f"{values[name]:.6g}" if name in values else "–" for values in known.values()))
    return table
