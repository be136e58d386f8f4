"""Counters of a worker's own work, in the scheduler process.

SGLang's `--enable-metrics` runs prometheus_client in multi-process mode: what any of its processes counts appears on
the worker's `/metrics`. Import this module only where SGLang has already set PROMETHEUS_MULTIPROC_DIR, that is below
the model runner.
"""

from collections import Counter as Counts
from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter


class AttentionMetrics:
    """What the `crossfill` backend computed: the proof that it, and not another backend, served a request.

    Rows, passes and seconds are counted once a forward pass, not once a layer.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.rows = Counter(
            "crossfill_attention_rows_total",
            "Query rows computed by the crossfill attention backend",
            ["phase"],
            registry=registry,
        )
        self.passes = Counter(
            "crossfill_attention_passes_total",
            "Forward passes (one chunk of a prefill, or one decode step of a batch) of the crossfill attention backend",
            ["phase"],
            registry=registry,
        )
        self.seconds = Counter(
            "crossfill_attention_seconds_total",
            "Wall time within the crossfill attention backend's layers; on a GPU that of giving it the work",
            ["phase"],
            registry=registry,
        )
        self._kernel_calls = Counter(
            "crossfill_kernel_calls_total",
            "Calls of crossfill_kernels by what served them; `native` is the C++ library",
            ["op", "implementation"],
            registry=registry,
        )
        self._counted: Counts[tuple[str, str]] = Counts()

    def count_kernels(self, calls: Mapping[tuple[str, str], int]) -> None:
        """Bring the count of kernel calls up to date; `calls` are those of the process so far."""
        for (op, implementation), total in calls.items():
            self._kernel_calls.labels(op, implementation).inc(total - self._counted[op, implementation])
            self._counted[op, implementation] = total
