"""The `crossfill` program. Commands import what they need when they run, so that help and completion answer at once."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossfill import bench_cli, calibrate_cli, config_cli, keys_cli, models_cli, route_cli, store_cli
from engines.models.prepare import DEFAULT_ROOT

app = typer.Typer(
    name="crossfill",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(models_cli.app, name="models", help="Make and judge the demo's models, ask a router for its own.")
app.add_typer(calibrate_cli.app, name="calibrate", help="Fit to data what the service decides by.")
app.add_typer(config_cli.app, name="config", help="Check, show and describe configuration files.")
app.add_typer(keys_cli.app, name="keys", help="Make, list and revoke API keys.")
app.add_typer(store_cli.app, name="store", help="Look into the store of attention state, check it, make room in it.")
app.add_typer(bench_cli.app, name="bench", help="Measure on this machine.")

_WORKER_GRACE_S = 45.0


def main() -> None:
    """Run the program; an error that the operator can act on is one line on stderr and status 1."""
    from cache_store.errors import StoreError
    from crossfill.errors import CrossfillError
    from engines.errors import EngineError
    from engines.fake_worker import ScriptError
    from router.errors import ConfigError

    try:
        app()
    except (CrossfillError, EngineError, ScriptError, ConfigError, StoreError) as error:
        typer.echo(f"crossfill: {error}", err=True)
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(f"crossfill: {error.filename or 'output'}: {error.strerror}", err=True)
        # What is left in the buffer would fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="The stack's YAML file.")] = Path("deploy/demo.yaml"),
    state_dir: Annotated[Path, typer.Option(help="Where logs and run files go.")] = Path("var"),
    models_root: Annotated[Path, typer.Option(help="Where models are made.")] = DEFAULT_ROOT,
) -> None:
    """Start workers and router from one file; Ctrl-C stops everything."""
    from crossfill.config import StackConfig
    from crossfill.up import up as run
    from router.config import load_yaml

    stack = load_yaml(config, StackConfig)
    raise typer.Exit(run(stack, state_dir=state_dir, models_root=models_root, console=Console()))


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="The router's YAML file; workers run elsewhere.")],
    processes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Router processes, instead of what the file says.")
    ] = None,
) -> None:
    """Run only the router."""
    from router.config import RouterConfig, load_yaml
    from router.server.processes import run

    router = load_yaml(config, RouterConfig)
    if processes is not None:
        router = router.model_copy(update={"listen": router.listen.model_copy(update={"processes": processes})})
    run(router)


app.command()(route_cli.route)


@app.command(context_settings={"allow_extra_args": True})
def worker(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A name of `crossfill models list`, a folder, or a Hugging Face id.")],
    name: Annotated[str | None, typer.Option(help="Name that the API shows; the folder's name by default.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 31000,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32 on a CPU, the model's own on CUDA by default.")] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(min=256, help="Size of the KV pool; 16384 on a CPU by default.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="OpenMP threads of each process.")] = 1,
    models_root: Annotated[Path, typer.Option(help="Where models are made.")] = DEFAULT_ROOT,
) -> None:
    """Run one SGLang worker with safe defaults; options after `--` go to SGLang as they are."""
    from pydantic import ValidationError

    from crossfill.foreground import run_worker
    from crossfill.plan import worker_spec
    from crossfill.up import prepare_sources
    from engines.config import WorkerConfig
    from engines.errors import WorkerConfigError

    settings = {
        "model_path": str(prepare_sources([model], models_root)[model]),
        "name": name or Path(model).resolve().name,
        "host": host,
        "port": port,
        "device": device,
        "dtype": dtype,
        "max_total_tokens": max_total_tokens,
        "threads": threads,
        "extra_args": tuple(context.args),
    }
    try:
        config = WorkerConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise WorkerConfigError(f"--{first['loc'][0]}: {first['msg']}".replace("_", "-")) from error
    spec = worker_spec(config, config.name, log=None)
    raise typer.Exit(run_worker(spec, grace_s=_WORKER_GRACE_S, console=Console()))


@app.command("fake-worker")
def fake_worker(
    script: Annotated[Path | None, typer.Argument(help="YAML script of latencies, chunks and faults.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 31000,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
) -> None:
    """Run a scripted stand-in for a worker: no model, no torch."""
    import logging

    from engines.fake_worker import Script, load_script, run

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    run(load_script(script) if script else Script(), host, port)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="Check this file too, and its ports and workers.")] = None,
) -> None:
    """Check that this installation can run a worker, and what a configuration needs of this machine."""
    from crossfill.doctor import examine

    raise typer.Exit(0 if examine(config, typer.echo) else 1)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"crossfill {version('crossfill')}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """A multi-LLM router on SGLang: one OpenAI-compatible endpoint, several models."""
