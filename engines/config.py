"""Settings of one worker, and the SGLang command line and environment that follow from them."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engines import platform
from engines.plugin import ATTENTION_BACKEND, INNER_VARIABLE, INTERPRET_VARIABLE, MAPPED_MODELS
from engines.reuse.settings import VARIABLE, ReuseSettings

Device = Literal["cpu", "cuda"]

# Set by Crossfill; a second value from `extra_args` would silently win in SGLang's parser.
_OWN_OPTIONS = frozenset({"--model-path", "--model", "--served-model-name", "--host", "--port", "--device"})


class WorkerSettings(BaseModel):
    """Settings that workers share; each has a default that is safe on a small machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device = "cpu"
    # A CPU without bf16 instructions prefills bf16 about six times slower than float32.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    # SGLang's own default takes most of the machine's memory for the KV pool.
    max_total_tokens: int | None = Field(default=None, ge=256)
    max_running_requests: int = Field(default=8, ge=1)
    chunked_prefill_size: int = Field(default=2048, ge=16)
    # Several processes that each spin more threads than the machine has cores fall below one token a second.
    threads: int = Field(default=1, ge=1)
    attention_backend: str | None = None
    # For a check without a GPU: the attention of reuse runs as Triton's interpreter runs it, thousands of times slower.
    interpret_triton: bool = False
    extra_args: tuple[str, ...] = ()

    def foreign_options(self) -> list[str]:
        """Options in `extra_args` that Crossfill sets itself, abbreviated (as SGLang's parser allows) or not."""
        given = {arg.split("=")[0] for arg in self.extra_args if arg.startswith("--")}
        return sorted(option for option in given if any(own.startswith(option) for own in _OWN_OPTIONS))


class WorkerConfig(WorkerSettings):
    """One worker: which model, under which name, where; and its part in reuse, None for none."""

    model_path: str = Field(min_length=1)
    name: str = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    reuse: ReuseSettings | None = None

    def sglang_args(self) -> list[str]:
        """SGLang's command line for this worker."""
        cpu = self.device == "cpu"
        args = {
            "--model-path": self.model_path,
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": str(self.port),
            "--device": self.device,
            "--dtype": self.dtype or ("float32" if cpu else "auto"),
            "--max-running-requests": str(self.max_running_requests),
            "--chunked-prefill-size": str(self.chunked_prefill_size),
            "--log-level": "warning",
            "--attention-backend": self._backend(),
            "--max-total-tokens": str(self.max_total_tokens or 16384) if cpu or self.max_total_tokens else None,
        }
        flags = ["--enable-metrics", "--enable-cache-report", "--disable-overlap-schedule"]
        if cpu:
            flags.append("--sleep-on-idle")
        return (
            [part for key, value in args.items() if value is not None for part in (key, value)]
            + flags
            + list(self.extra_args)
        )

    def _backend(self) -> str | None:
        """SGLang's value: ours where it computes or plans; None lets SGLang choose."""
        if self.reuse is not None:
            return ATTENTION_BACKEND
        return self.attention_backend or (ATTENTION_BACKEND if self.device == "cpu" else None)

    @property
    def _inner(self) -> str | None:
        """SGLang's backend beside which reuse runs; None for ours alone."""
        if self.reuse is None or self.attention_backend == ATTENTION_BACKEND:
            return None
        # Triton's is the one that runs on every GPU that SGLang supports.
        return self.attention_backend or ("triton" if self.device == "cuda" else None)

    def environment(self) -> dict[str, str]:
        """Variables to add to the worker's environment."""
        env = {
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            # SGLang's /health would otherwise generate a token, which is work on a CPU and says "dead" while a long
            # prefill runs.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        if self.device == "cpu":
            env["SGLANG_PLATFORM"] = platform.NAME
        if self._inner is not None:
            env[INNER_VARIABLE] = self._inner
        if self.interpret_triton:
            env[INTERPRET_VARIABLE] = "1"
        if self.reuse is not None:
            env[VARIABLE] = self.reuse.model_dump_json()
            if self.reuse.takes_maps:
                # SGLang then takes these in the place of its own models of the same names.
                env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = MAPPED_MODELS
        if Path(self.model_path).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        return env
