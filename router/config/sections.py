"""The other sections of a configuration, and the whole of it."""

from typing import Self

from pydantic import Field, model_validator

from cache_store.config import StoreSettings
from cache_store.sizes import SizeBytes
from router.config.models import ModelConfig
from router.config.routing import RoutingConfig
from router.config.values import ConfigPath, Port, Seconds, Section, repeated


class ListenConfig(Section):
    """Where the router listens, and in how many processes; port 0 lets the system choose one."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: Port = 8000
    processes: int = Field(default=1, ge=1, le=64)


class AuthConfig(Section):
    """Who may use the router: whoever has a key of `keys_file`; without that, all who reach it, as one tenant.

    Its administration is for those with a key of `admin_keys_file`, and without that for nobody.
    """

    keys_file: ConfigPath | None = None
    admin_keys_file: ConfigPath | None = None


class LimitsConfig(Section):
    """What a request may be and how long its client may take.

    Of a body: bytes, levels of nested arrays and objects, and how many arrays, objects and scalars it holds in all.
    `choices` bounds `n`; `default_max_tokens` bounds an answer whose client does not. `upload_s` holds from the head of
    a request to the end of its body, `client_write_s` for the time in which a client takes nothing of its answer.
    """

    body_bytes: SizeBytes = Field(default=8 * 2**20, ge=1)
    # Bodies are read with up to 1024 levels, but written again with up to 254.
    nesting_depth: int = Field(default=64, ge=4, le=250)
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
    # Made when it is asked for: the default lies where the program was started.
    store: StoreSettings = Field(default_factory=StoreSettings)


class RouterConfig(RouterSections):
    """All that a router process needs to know."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if (name := repeated(list(self.model_names))) is not None:
            raise ValueError(f"models has the name {name!r} twice")
        self.routing.require_known(self.model_names)
        self.routing.require_costs({model.name for model in self.models if model.cost is not None})
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        """The concrete models, in the order of the file."""
        return tuple(model.name for model in self.models)
