"""The one file of `crossfill up`: models, the workers to start for each, and the router's settings."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from engines.config import WorkerConfig, WorkerSettings
from engines.reuse.settings import MapSettings, PairTuning, ReuseSettings, ShadowSettings, Weights
from router.config import (
    CostConfig,
    ModelConfig,
    ModelName,
    Port,
    RouterConfig,
    RouterSections,
    Seconds,
    Section,
    SystemRole,
    WorkerUrl,
)
from router.config.values import ConfigPath
from router.faults import PlacedError, unknown_model


def _no_foreign_options(settings: WorkerSettings) -> WorkerSettings:
    if foreign := settings.foreign_options():
        raise ValueError(f"extra_args may not set {', '.join(foreign)}: Crossfill sets it itself")
    return settings


Worker = Annotated[WorkerSettings, AfterValidator(_no_foreign_options)]


class StackModel(Section):
    """One model: started here (`source`, `replicas`) or already served elsewhere (`urls`).

    `source` is a name that `crossfill models list` shows, a folder, or a Hugging Face id.
    """

    name: ModelName
    source: str | None = Field(default=None, min_length=1)
    replicas: int = Field(default=1, ge=1, le=64)
    urls: tuple[WorkerUrl, ...] = ()
    capability: float | None = Field(default=None, ge=0, le=1)
    prefill_tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    system_role: SystemRole = "system"
    cost: CostConfig | None = None
    worker: Worker = WorkerSettings()

    @model_validator(mode="after")
    def _started_or_elsewhere(self) -> Self:
        if self.source is None and not self.urls:
            raise ValueError(f"model {self.name!r} needs source (to be started here) or urls (served elsewhere)")
        if self.source is not None and self.urls:
            raise ValueError(
                f"model {self.name!r} has both source (started here) and urls (served elsewhere); keep one"
            )
        if self.urls and (self.replicas > 1 or self.worker != WorkerSettings()):
            raise ValueError(f"model {self.name!r} is served elsewhere (urls): replicas and worker are for source")
        return self


class PairConfig(PairTuning):
    """The receiver prefills with attention masses that the sender left; both share a tokenizer and are started here.

    `layers` names, of each receiver layer, the sender layer whose masses guide it; `suffix` counts from the last ones.
    `artifact` is the folder of a calibration, which says all of that and whether the pair may be used at all.
    """

    sender: ModelName
    receiver: ModelName
    layers: Literal["suffix"] | tuple[Annotated[int, Field(ge=0)], ...] = "suffix"
    artifact: ConfigPath | None = None

    @model_validator(mode="after")
    def _two_models(self) -> Self:
        if self.sender == self.receiver:
            raise ValueError(f"{self.sender!r} is sender and receiver; a model reuses its own prefixes anyway")
        by_hand = sorted(self.model_fields_set - {"sender", "receiver", "artifact"})
        if self.artifact is not None and by_hand:
            raise ValueError(f"artifact says {', '.join(by_hand)} already; leave out one or the other")
        if self.artifact is None and self.weights is Weights.FITTED:
            raise ValueError("fitted weights come from an artifact; name its folder by artifact")
        return self


class ReuseConfig(Section):
    """Reuse between models: which pairs, and how long a request whose turn has come waits for the store.

    That is at most `wait_s` seconds, and at most `wait_share` of the time that it may save. `shadow` watches quality.
    """

    pairs: tuple[PairConfig, ...] = ()
    wait_s: float = Field(default=0.02, ge=0, le=10, allow_inf_nan=False)
    wait_share: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    shadow: ShadowSettings = ShadowSettings()
    maps: MapSettings = MapSettings()


class SupervisorConfig(Section):
    """How processes are started and stopped, in seconds."""

    # Ten times what a worker took on two cores: a first start also reads the weights from a cold disk.
    start_timeout_s: Seconds = 600.0
    # Longer than the router gives its streams to finish.
    stop_grace_s: Seconds = 45.0
    restart_backoff_max_s: Seconds = 60.0


class StackConfig(RouterSections):
    """All that `crossfill up` needs to know.

    Ports of workers count up from `first_worker_port`; taken ones are skipped.
    """

    models: tuple[StackModel, ...] = Field(min_length=1)
    worker: Worker = WorkerSettings()
    reuse: ReuseConfig = ReuseConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    first_worker_port: Port = 31000

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        # The router's own checks: names unique, ladder known.
        self.outline()
        names = [model.name for model in self.models]
        elsewhere = {model.name for model in self.models if model.source is None}
        for place, pair in enumerate(self.reuse.pairs):
            for key in ("sender", "receiver"):
                keys, name = ("reuse", "pairs", place, key), getattr(pair, key)
                if name not in names:
                    raise unknown_model(keys, name, names)
                if name in elsewhere:
                    raise PlacedError(keys, f"{name!r} is served elsewhere (urls), and reuse needs a source")
        if self.reuse.pairs and self.store.url.startswith("memory:"):
            raise ValueError("reuse.pairs needs a store that processes share; memory:// is within one process")
        return self

    def outline(self) -> RouterConfig:
        """The router's configuration before anything is started, with stand-ins for the addresses to come."""
        return self.router_config({model.name: [f"http://127.0.0.1:{n + 1}"] for n, model in enumerate(self.models)})

    def router_config(self, started: dict[str, list[str]]) -> RouterConfig:
        """The router's configuration, given the addresses of the workers started here, by model."""
        return RouterConfig(
            models=tuple(
                ModelConfig(
                    name=m.name,
                    workers=m.urls or tuple(started[m.name]),
                    capability=m.capability,
                    cost=m.cost,
                    prefill_tokens_per_s=m.prefill_tokens_per_s,
                    system_role=m.system_role,
                    reuses=m.name in {pair.receiver for pair in self.reuse.pairs},
                )
                for m in self.models
            ),
            **{name: getattr(self, name) for name in RouterSections.model_fields},
        )

    def worker_config(
        self, model: StackModel, path: Path | str, port: int, reuse: ReuseSettings | None = None
    ) -> WorkerConfig:
        """Settings of one worker, and where it lies and listens."""
        settings = self.worker_settings(model).model_dump()
        return WorkerConfig(**settings, model_path=str(path), name=model.name, port=port, reuse=reuse)

    def worker_settings(self, model: StackModel) -> WorkerSettings:
        """Settings of a model's workers: the shared ones, overridden by what the model's own section names."""
        return WorkerSettings(**{**self.worker.model_dump(), **model.worker.model_dump(exclude_unset=True)})
