"""Timing several functions against each other: round by round, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def paired_seconds(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each function in each round; a round calls every function once, in order. One call warms up."""
    for function in functions.values():
        function()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - started)
    return taken


def median_ratio(above: list[float], below: list[float]) -> float:
    """Median over the rounds of `above` / `below`."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def causal_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], object]:
    """Dense causal attention by torch, of attention of [T, H, d] over [T, H_kv, d]."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, keys, values))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def setting() -> str:
    """What a table was measured on, for its title."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{capability}, {torch.get_num_threads()} thread, float32, torch {torch.__version__}"
