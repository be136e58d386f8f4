"""Configuration of the router: frozen models, validated once at start-up, every fault told in one readable line.

The section classes are gathered in `RouterSections`, which a larger file can inherit. `load_yaml` reads any pydantic
model from a YAML file and reports in the same way.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from router.errors import ConfigError
from router.yaml_file import load_yaml

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "AUTO_MODEL",
    "AffinityConfig",
    "AuthConfig",
    "ConfigError",
    "CostConfig",
    "HealthConfig",
    "HeuristicScorerConfig",
    "LearnedScorerConfig",
    "LimitsConfig",
    "ListenConfig",
    "ModelConfig",
    "RecordedScorerConfig",
    "RouterConfig",
    "RouterSections",
    "RoutingConfig",
    "Section",
    "SessionsConfig",
    "StreamsConfig",
    "SystemRole",
    "UpstreamConfig",
    "load_yaml",
]

AUTO_MODEL = "auto"

SystemRole = Literal["system", "native", "user"]
"""What becomes of `system` and `developer` turns on their way to a model."""

Value = TypeVar("Value")

_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB)", re.ASCII)
_SIZE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}", re.ASCII)


def _parse_size(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"not a size: {value!r}; write bytes, or a number with B, KiB, MiB or GiB")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _check_model_name(name: str) -> str:
    if name == AUTO_MODEL:
        raise ValueError(f"the name {AUTO_MODEL!r} is reserved for the routed model")
    if not _MODEL_NAME.fullmatch(name):
        raise ValueError(f"not a model name: {name!r}; use letters, digits and . _ : / @ + -")
    return name


def _check_worker_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {url!r}")
    if parts.username or parts.password:
        raise ValueError("a worker URL must not carry credentials")
    if parts.query or parts.fragment:
        raise ValueError(f"a worker URL has no query and no fragment: {url!r}")
    if parts.path not in {"", "/"}:
        raise ValueError(f"a worker URL has no path, write it without {parts.path.rstrip('/')}: {url!r}")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"bad port in {url!r}") from error
    return url.rstrip("/")


def _from_config_folder(path: Path, info: ValidationInfo) -> Path:
    """A relative path in a configuration file is relative to that file."""
    folder = (info.context or {}).get("folder")
    return path if folder is None else Path(folder).absolute() / path


def _repeated(values: list[Value]) -> Value | None:
    return next((value for index, value in enumerate(values) if value in values[:index]), None)


_WrittenSize = int | Annotated[str, Field(pattern=f"^{_SIZE.pattern}$")]

SizeBytes = Annotated[int, BeforeValidator(_parse_size, json_schema_input_type=_WrittenSize)]
"""A size in bytes; a file may also say `8MiB`."""

ModelName = Annotated[str, AfterValidator(_check_model_name)]
WorkerUrl = Annotated[str, AfterValidator(_check_worker_url)]
ConfigPath = Annotated[Path, AfterValidator(_from_config_folder)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A part of a configuration: frozen, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ListenConfig(Section):
    """Where the router listens, and in how many processes; port 0 lets the system choose one."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: Port = 8000
    processes: int = Field(default=1, ge=1, le=64)


class AuthConfig(Section):
    """Who may use the router: whoever has a key of `keys_file`; without that, all who reach it, as one tenant."""

    keys_file: ConfigPath | None = None


class CostConfig(Section):
    """Price of a model per million tokens of prompt and of answer, in a unit that all models share."""

    input: NotNegative
    output: NotNegative


class ModelConfig(Section):
    """A model and the workers that serve it.

    `capability` in [0, 1] is how well the model answers the hardest queries; without it the ladder's default is used.
    `prefill_tokens_per_s` is how fast a worker prefills; without it the router learns it.
    `system_role` says how it takes system turns: `system` renames developer turns, `native` changes nothing, `user`
    merges both into the first user turn.
    """

    name: ModelName
    workers: tuple[WorkerUrl, ...] = Field(min_length=1)
    capability: float | None = Field(default=None, ge=0, le=1)
    cost: CostConfig | None = None
    prefill_tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    system_role: SystemRole = "system"

    @model_validator(mode="after")
    def _workers_differ(self) -> Self:
        if (url := _repeated(list(self.workers))) is not None:
            raise ValueError(f"model {self.name!r} lists the worker {url} twice")
        return self


class HeuristicScorerConfig(Section):
    """Scores from the text of the request alone."""

    kind: Literal["heuristic"] = "heuristic"


class RecordedScorerConfig(Section):
    """Scores recorded in a JSONL file of `{"prompt": str, "scores": {model: quality}}`."""

    kind: Literal["recorded"] = "recorded"
    path: ConfigPath


class LearnedScorerConfig(Section):
    """Scores of a model that `crossfill calibrate router` fitted; `path` is its file."""

    kind: Literal["learned"] = "learned"
    path: ConfigPath


def _spelt_out(scorer: object) -> object:
    """The one scorer without settings may be given by its name alone."""
    return {"kind": scorer} if scorer == "heuristic" else scorer


_Scorer = Annotated[HeuristicScorerConfig | RecordedScorerConfig | LearnedScorerConfig, Field(discriminator="kind")]
ScorerConfig = Annotated[_Scorer, BeforeValidator(_spelt_out, json_schema_input_type=_Scorer | Literal["heuristic"])]


def _tau_kind(tau: object) -> str:
    return "list" if isinstance(tau, list | tuple) else "number"


Thresholds = Annotated[
    Annotated[Finite, Tag("number")] | Annotated[tuple[Finite, ...], Tag("list")], Discriminator(_tau_kind)
]


class RoutingConfig(Section):
    """How the model `auto` chooses; the rule stands in `router.policy`.

    `ladder` names two or more models, weakest first; None means that `auto` is not offered. `tau` is one number, or a
    list with one for each pair of neighbours. `cost_weight` is score per unit of cost, `ttft_weight` score per second.
    """

    ladder: tuple[str, ...] | None = None
    tau: Thresholds = 0.3
    sigma: NotNegative = 0.1
    cost_weight: NotNegative = 0.0
    ttft_weight: NotNegative = 0.0
    scorer: ScorerConfig = HeuristicScorerConfig()

    @model_validator(mode="after")
    def _ladder_and_thresholds_fit(self) -> Self:
        if self.ladder is None:
            return self
        if len(self.ladder) < 2:
            raise ValueError(f"ladder takes two models or more, weakest first; it has {len(self.ladder)}")
        if (name := _repeated(list(self.ladder))) is not None:
            raise ValueError(f"ladder names {name!r} twice")
        if isinstance(self.tau, tuple) and len(self.tau) != len(self.ladder) - 1:
            raise ValueError(
                f"tau takes one number, or a list of {len(self.ladder) - 1} for the neighbours of this ladder; "
                f"it has {len(self.tau)}"
            )
        return self

    def require_known(self, models: tuple[str, ...]) -> None:
        """Raise ValueError if the ladder names a model that is not in `models`."""
        for name in self.ladder or ():
            if name not in models:
                raise ValueError(f"routing.ladder names {name!r}, which is not in models ({', '.join(models)})")

    def require_costs(self, priced: Collection[str]) -> None:
        """Raise ValueError if cost counts and a model of the ladder is not among the `priced` ones."""
        unpriced = [name for name in self.ladder or () if name not in priced]
        if self.cost_weight > 0 and unpriced:
            raise ValueError(
                "routing.cost_weight needs a cost for every model of the ladder; there is none for "
                + ", ".join(map(repr, unpriced))
            )


class LimitsConfig(Section):
    """What a request may be and how long its client may take.

    Of a body: bytes, levels of nested arrays and objects, and how many arrays, objects and scalars it holds in all.
    `choices` bounds `n`; `default_max_tokens` bounds an answer whose client does not. `upload_s` holds from the head of
    a request to the end of its body, `client_write_s` for the time in which a client takes nothing of its answer.
    """

    body_bytes: SizeBytes = Field(default=8 * 2**20, ge=1)
    nesting_depth: int = Field(default=64, ge=4, le=500)
    json_values: int = Field(default=200_000, ge=100)
    choices: int = Field(default=8, ge=1)
    default_max_tokens: int | None = Field(default=None, ge=1)
    upload_s: Seconds = 60.0
    client_write_s: Seconds = 60.0


class StreamsConfig(Section):
    """What clients of streams see beside the worker's events.

    When nothing came for `heartbeat_s` seconds, an SSE comment is written, before the first byte after early response
    headers; None turns that off.
    """

    heartbeat_s: Seconds | None = 15.0


class UpstreamConfig(Section):
    """Limits of one worker request, in seconds, and how many workers may be tried before the first byte.

    `first_byte_s` holds for streams; an answer in one piece has no byte before its end, so only `total_s` bounds it.
    """

    connect_s: Seconds = 5.0
    first_byte_s: Seconds = 300.0
    between_bytes_s: Seconds = 120.0
    total_s: Seconds = 1800.0
    attempts: int = Field(default=2, ge=1, le=10)


class HealthConfig(Section):
    """Probing of workers: pause between probes, limit of one, and failures in a row that make a worker unhealthy."""

    interval_s: Seconds = 2.0
    timeout_s: Seconds = 5.0
    unhealthy_after: int = Field(default=3, ge=1)


class AffinityConfig(Section):
    """Requests go to the worker that holds the beginning of their prompt.

    `mirror_bytes` is the memory, of all workers together, in which the router notes what they hold. A worker with more
    than `margin` requests in flight above the least is passed over. `min_share` of a new conversation's prompt must lie
    on a worker to draw it there.
    """

    enabled: bool = True
    mirror_bytes: SizeBytes = Field(default=64 * 2**20, ge=2**16)
    margin: int = Field(default=8, ge=0)
    min_share: float = Field(default=0.3, ge=0, le=1)


class SessionsConfig(Section):
    """With `sticky`, later turns of an `auto` conversation stay with its model; `remembered` bounds the turns known."""

    sticky: bool = False
    remembered: int = Field(default=10_000, ge=1)


class RouterSections(Section):
    """A router's settings apart from its models; a larger configuration inherits them."""

    listen: ListenConfig = ListenConfig()
    auth: AuthConfig = AuthConfig()
    routing: RoutingConfig = RoutingConfig()
    limits: LimitsConfig = LimitsConfig()
    streams: StreamsConfig = StreamsConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    health: HealthConfig = HealthConfig()
    affinity: AffinityConfig = AffinityConfig()
    sessions: SessionsConfig = SessionsConfig()


class RouterConfig(RouterSections):
    """All that a router process needs to know."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if (name := _repeated(list(self.model_names))) is not None:
            raise ValueError(f"models has the name {name!r} twice")
        self.routing.require_known(self.model_names)
        self.routing.require_costs({model.name for model in self.models if model.cost is not None})
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        """The concrete models, in the order of the file."""
        return tuple(model.name for model in self.models)
