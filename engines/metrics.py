"""Counters of a worker's own work, in the scheduler process.

SGLang's `--enable-metrics` runs prometheus_client in multi-process mode: what any of its processes counts appears on
the worker's `/metrics`. Import this module only where SGLang has already set PROMETHEUS_MULTIPROC_DIR, that is below
the model runner.
"""

from prometheus_client import REGISTRY, CollectorRegistry, Counter


class AttentionMetrics:
    """What the `crossfill` backend computed: the proof that it, and not another backend, served a request.

    Both are counted once a forward pass, not once a layer.
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
