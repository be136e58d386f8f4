"""What guided reuse brings, and what it costs, for one pair of models on this machine.

Two real workers give the times, one after the other in turns, and one process the quality: the same models with the
same kernels and records, where every hidden state can be read.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import aiohttp

from cache_store.config import StoreSettings
from cache_store.keys import PAGE
from crossfill.bench_reuse_report import Figures, ReuseBench, report, tables
from crossfill.bench_reuse_workers import Rounds, Worker, measure
from crossfill.bench_worker import started
from crossfill.errors import BenchError
from crossfill.ports import Ports
from crossfill.reuse_plan import calibrated
from engines.config import WorkerConfig
from engines.reuse.identity import read_identity
from engines.reuse.settings import PairSettings, ReuseSettings, Weights, align_suffix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console

    from crossfill.progress import Bars
    from engines.reuse.study.pair import Pair

SENDER, RECEIVER = "smollm2-135m-instruct", "smollm2-113m-healed"

# Layers of the sender that the receiver was made without.
_DROPPED = frozenset({3, 4, 5, 12, 25, 26})
_FIRST_PORT = 31900
WARM_UP_TOKENS = 1024
# In worker and study: rows that are computed at once, and bytes of a number of the cache.
_CHUNK = 2048
_FLOAT32_BYTES = 4
_TIMED_TEXTS = 3


def read_pair(
    folders: Mapping[str, Path],
    sender: str,
    receiver: str,
    *,
    layers: Sequence[int] = (),
    first_layer: int = 3,
    weights: Weights | None = None,
    top_p: float = 0.95,
    artifact: Path | None = None,
) -> PairSettings:
    """How `receiver` is to use `sender`.

    Args:
        folders: of both models, by name.
        layers: sender layer of each receiver layer; by default the known ones of the demo pair, else the last ones.
        weights: how heads are mixed; by default `identity` for the demo pair, whose heads were one, else `uniform`.
        artifact: folder of a calibration that says all of this instead.

    Raises:
        BenchError: the models cannot share.
        StartError: the artifact cannot be used.
    """
    theirs, own = read_identity(sender, folders[sender]), read_identity(receiver, folders[receiver])
    if theirs.tokenizer != own.tokenizer:
        raise BenchError(f"{receiver} cannot use what {sender} leaves: they have different tokenizers")
    if artifact is not None:
        pair = calibrated(artifact.absolute(), theirs, own)
        if pair.refused is not None:
            raise BenchError(f"{artifact}: workers would take nothing by it: {pair.refused.value}")
        return pair
    is_demo = (sender, receiver) == (SENDER, RECEIVER)
    if not layers and is_demo:
        layers = [layer for layer in range(theirs.layers) if layer not in _DROPPED]
    try:
        return PairSettings(
            sender=theirs,
            layers=tuple(layers) or align_suffix(own.layers, theirs.layers),
            first_layer=first_layer,
            weights=weights or (Weights.IDENTITY if is_demo else Weights.UNIFORM),
            top_p=top_p,
            # What is to be measured must not be refused.
            min_tokens=PAGE,
            max_density=1.0,
        )
    except ValueError as error:
        raise BenchError(f"{sender} and {receiver} cannot be paired so: {error}") from error


def bench_reuse(
    bench: ReuseBench, folders: Mapping[str, Path], *, output: Path | None, console: Console, progress: Bars
) -> list[Figures]:
    """Measure a pair, print tables, and write everything to `output` as JSON.

    Raises:
        BenchError: a worker did not start or did something else than what was to be timed.
        StartError: no port is free.
    """
    check_lengths(bench.tokens)

    def keep(rounds: Mapping[int, Rounds]) -> None:
        # Hours may be still to come; what is interrupted then need not be measured again.
        if output:
            write_json(output, report(bench, []) | {"rounds": {tokens: asdict(one) for tokens, one in rounds.items()}})

    rounds = asyncio.run(_time_workers(bench, folders, keep, progress))
    pair = load_pair(bench.pair, bench.receiver, folders)
    figures = [_study(bench, pair, tokens, rounds[tokens], progress) for tokens in bench.tokens]
    for table in tables(bench, figures):
        console.print(table)
    if output:
        write_json(output, report(bench, figures))
    return figures


def check_lengths(tokens: Sequence[int]) -> None:
    """Make sure that prompts can be of these lengths.

    Raises:
        BenchError: they cannot.
    """
    if any(length % PAGE or length < 2 * PAGE for length in tokens):
        raise BenchError(f"prompts have whole pages of {PAGE} tokens, two at the least")


def write_json(output: Path, data: Mapping[str, Any]) -> None:
    """What was measured, for machines."""
    output.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


async def _time_workers(
    bench: ReuseBench, folders: Mapping[str, Path], keep: Callable[[Mapping[int, Rounds]], None], progress: Bars
) -> dict[int, Rounds]:
    from engines.reuse.study.passages import passage

    tokenizer = load_tokenizer(folders[bench.pair.sender.name])

    def prompts(tokens: int, rounds: int) -> list[list[int]]:
        return [passage(tokenizer, tokens, bench.seed + number) for number in range(rounds)]

    with ExitStack() as held:
        ports = held.enter_context(Ports(_FIRST_PORT))
        store = Path(held.enter_context(TemporaryDirectory(prefix="crossfill-bench-"))) / "store"
        configs = _configs(bench, folders, StoreSettings(url=f"lmdb://{store}"), ports)
        progress("starting workers", 0, None)
        async with aiohttp.ClientSession() as session, started(session, *configs) as children:
            sender, receiver = (
                Worker(session, config, child.cpu_s) for config, child in zip(configs, children, strict=True)
            )
            # The first requests of a process find nothing warm.
            await measure(sender, receiver, prompts(WARM_UP_TOKENS, 2), PAGE, lambda _: None)
            measured: dict[int, Rounds] = {}
            for tokens in bench.tokens:
                stage = f"{tokens} tokens, time to first token"
                progress(stage, 0, bench.rounds)
                measured[tokens] = await measure(
                    sender,
                    receiver,
                    prompts(tokens, bench.rounds),
                    PAGE,
                    lambda done, stage=stage: progress(stage, done, bench.rounds),  # type: ignore[misc]
                )
                keep(measured)
            return measured


def _configs(
    bench: ReuseBench, folders: Mapping[str, Path], store: StoreSettings, ports: Ports
) -> tuple[WorkerConfig, WorkerConfig]:
    pair, own = bench.pair, read_identity(bench.receiver, folders[bench.receiver])
    published = tuple(sorted(set(pair.guided.values())))
    parts = (
        (pair.sender.name, ReuseSettings(model=pair.sender, publish=published, store=store)),
        (bench.receiver, ReuseSettings(model=own, pairs=(pair,), store=store)),
    )
    sender, receiver = (
        worker_config(folders[name], name, reuse, port=ports.take(), tokens=bench.tokens) for name, reuse in parts
    )
    return sender, receiver


def worker_config(folder: Path, name: str, reuse: ReuseSettings, *, port: int, tokens: Sequence[int]) -> WorkerConfig:
    """A worker that prefills prompts of these lengths, and those that warm it up."""
    return WorkerConfig(
        model_path=str(folder),
        name=name,
        port=port,
        max_total_tokens=2 * max(*tokens, WARM_UP_TOKENS) + 1024,
        chunked_prefill_size=_CHUNK,
        reuse=reuse,
    )


def load_tokenizer(folder: Path) -> Any:
    """Of the model in a folder."""
    from engines.models.loading import import_transformers

    return import_transformers("measure reuse").AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_pair(settings: PairSettings, receiver_name: str, folders: Mapping[str, Path]) -> Pair:
    """Both models in this process, with one thread as a worker has."""
    import torch

    from engines.models.loading import load
    from engines.reuse.guided import mixtures
    from engines.reuse.study.network import Network
    from engines.reuse.study.pair import Pair

    torch.set_num_threads(1)
    sender, receiver = (Network(load(folders[name])) for name in (settings.sender.name, receiver_name))
    weights = mixtures(settings, read_identity(receiver_name, folders[receiver_name]))
    return Pair(sender, receiver, settings, weights)


def _study(bench: ReuseBench, pair: Pair, tokens: int, rounds: Rounds, progress: Bars) -> Figures:
    from engines.models.needle import needles
    from engines.reuse.study.quality import study_quality
    from engines.reuse.study.runs import NEEDLE_TOKENS
    from engines.reuse.study.timing import time_attention

    times = time_attention(pair, tokens, chunk=_CHUNK, rounds=_TIMED_TEXTS, seed=bench.seed, progress=progress)
    asked = needles(pair.receiver.loaded, count=bench.needles, tokens=NEEDLE_TOKENS, seed=bench.seed)
    study = study_quality(pair, tokens, texts=bench.texts, needles=asked, seed=bench.seed, progress=progress)
    return Figures(tokens, rounds, times, study, _FLOAT32_BYTES * pair.sender.kv_numbers)
