"""`crossfill bench`: measurements on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from engines.models.prepare import DEFAULT_ROOT
from engines.reuse.settings import Weights

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


@app.command()
def router(
    levels: Annotated[str, typer.Option(help="Streams in flight, on average.")] = "1,10,50",
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds measured at each level.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    scorer_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A learned scorer to route by.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the results as JSON.")] = None,
) -> None:
    """What the router adds to the time to first token, and its CPU time, against the same load sent directly."""
    from rich.console import Console

    from crossfill.bench_router import bench_router
    from crossfill.bench_router_report import RouterBench

    bench = RouterBench(tuple(int(part) for part in levels.split(",")), seconds, seed, scorer_file)
    bench_router(bench, output=output, console=Console())


@app.command()
def store(
    url: Annotated[
        list[str] | None,
        typer.Option(help="A store, which is filled; by default one in memory, LMDB, and Redis if it is installed."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Lengths of prefixes.")] = "4096,20000",
    rounds: Annotated[
        int, typer.Option(min=1, help="How often a prefix is published; it is looked up and read at least 200 times.")
    ] = 40,
    mirror_pages: Annotated[str, typer.Option(help="Pages of the radix mirror.")] = "1000,10000,100000,1000000",
    output: Annotated[Path | None, typer.Option(help="Also write the results as JSON.")] = None,
) -> None:
    """Publishing and lookups of the store against plain calls of the libraries below, and its mirror's memory."""
    from rich.console import Console

    from crossfill.bench_store import bench_store
    from crossfill.bench_store_report import StoreBench
    from crossfill.progress import bars

    lengths, sizes = (tuple(int(part) for part in text.split(",")) for text in (tokens, mirror_pages))
    bench = StoreBench(tuple(url or ()), lengths, rounds=rounds, mirror_pages=sizes)
    with bars() as progress:
        bench_store(bench, output=output, console=Console(), progress=progress)


@app.command()
def reuse(
    sender: Annotated[
        str, typer.Option(help="Model of the catalogue that leaves its masses.")
    ] = "smollm2-135m-instruct",
    receiver: Annotated[str, typer.Option(help="Model that takes them.")] = "smollm2-113m-healed",
    layers: Annotated[
        str, typer.Option(help="Sender layer of each receiver layer; by default those that fit, or the last ones.")
    ] = "",
    weights: Annotated[
        Weights | None,
        typer.Option(help="How heads are mixed; by default identity for the demo pair, else uniform."),
    ] = None,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Attention mass to keep.")] = 0.95,
    first_layer: Annotated[int, typer.Option(min=0, help="First guided layer.")] = 3,
    artifact: Annotated[Path | None, typer.Option(help="Folder of a calibration, which says all that instead.")] = None,
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "1024,2048,4096,7680",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every time to first token.")] = 12,
    texts: Annotated[int, typer.Option(min=1, help="Continuations of each length.")] = 3,
    needles: Annotated[int, typer.Option(min=2, help="Facts to recall at each length.")] = 40,
    seed: Annotated[int, typer.Option(help="Of texts, facts and random masks.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short prompts, few rounds: minutes, and wide intervals.")
    ] = False,
    models_root: Annotated[Path, typer.Option(help="Where models are made.")] = DEFAULT_ROOT,
    output: Annotated[Path | None, typer.Option(help="Also write the results as JSON.")] = None,
) -> None:
    """Time to first token and quality of a receiver that a sender's attention guides, and what that costs both."""
    from dataclasses import replace

    from rich.console import Console

    from crossfill.bench_reuse import bench_reuse, read_pair
    from crossfill.bench_reuse_report import QUICK, ReuseBench
    from crossfill.progress import bars
    from crossfill.up import prepare_sources

    folders = {name: Path(folder) for name, folder in prepare_sources([sender, receiver], models_root).items()}
    pair = read_pair(
        folders,
        sender,
        receiver,
        layers=[int(part) for part in layers.split(",") if part],
        first_layer=first_layer,
        weights=weights,
        top_p=top_p,
        artifact=artifact,
    )
    lengths = tuple(int(part) for part in tokens.split(","))
    bench = ReuseBench(pair, receiver, lengths, rounds=rounds, texts=texts, needles=needles, seed=seed)
    with bars() as progress:
        bench_reuse(
            replace(bench, **QUICK) if quick else bench,
            folders,
            output=output,
            console=Console(),
            progress=progress,
        )


@app.command()
def maps(
    sender: Annotated[str, typer.Option(help="Model of the catalogue that packs its maps.")] = "smollm2-135m-instruct",
    receiver: Annotated[str, typer.Option(help="Model that takes them.")] = "smollm2-113m-healed",
    weights: Annotated[
        Weights | None,
        typer.Option(help="How heads are mixed; by default identity for the demo pair, else uniform."),
    ] = None,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Attention mass to keep if guided.")] = 0.95,
    map_top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Attention mass that maps keep.")] = 0.9,
    map_density: Annotated[float, typer.Option(min=0.01, max=1.0, help="Density up to which hybrid maps.")] = 0.5,
    first_layer: Annotated[int, typer.Option(min=0, help="First reused layer.")] = 3,
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "1024,2048,4096",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every time to first token.")] = 8,
    texts: Annotated[int, typer.Option(min=0, help="Continuations of each length; 0 measures times alone.")] = 3,
    needles: Annotated[int, typer.Option(min=2, help="Facts to recall at each length.")] = 24,
    pool_bytes: Annotated[int, typer.Option(min=2**20, help="Of the block pool.")] = 3 * 2**30,
    seed: Annotated[int, typer.Option(help="Of texts and facts.")] = 0,
    models_root: Annotated[Path, typer.Option(help="Where models are made.")] = DEFAULT_ROOT,
    output: Annotated[Path | None, typer.Option(help="Also write the results as JSON.")] = None,
) -> None:
    """Time to first token and quality of a receiver prefilled densely, guided, by maps, and by both."""
    import os

    from rich.console import Console

    from crossfill.bench_maps import MapBench, bench_maps
    from crossfill.bench_reuse import read_pair
    from crossfill.progress import bars
    from crossfill.up import prepare_sources
    from engines.reuse.settings import MapSettings

    folders = {name: Path(folder) for name, folder in prepare_sources([sender, receiver], models_root).items()}
    pair = read_pair(folders, sender, receiver, first_layer=first_layer, weights=weights, top_p=top_p)
    pair = pair.model_copy(update={"map_top_p": map_top_p, "map_density": map_density})
    lengths = tuple(int(part) for part in tokens.split(","))
    settings = MapSettings(pool=f"bench-{os.getpid()}", pool_bytes=pool_bytes, capture_bytes=2**30)
    bench = MapBench(pair, receiver, lengths, rounds, texts, needles, seed, settings)
    with bars() as progress:
        bench_maps(bench, folders, output=output, console=Console(), progress=progress)
