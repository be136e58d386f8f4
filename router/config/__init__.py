"""Configuration of the router: frozen models, validated once at start-up, every fault told in one readable line.

The sections are gathered in `RouterSections`, which a larger file can inherit. `load_yaml` reads any pydantic model
from a YAML file and reports in the same way.
"""

from router.config.models import CostConfig, ModelConfig
from router.config.routing import HeuristicScorerConfig, LearnedScorerConfig, RecordedScorerConfig, RoutingConfig
from router.config.sections import (
    AffinityConfig,
    AuthConfig,
    HealthConfig,
    LimitsConfig,
    ListenConfig,
    RouterConfig,
    RouterSections,
    SessionsConfig,
    StreamsConfig,
    UpstreamConfig,
)
from router.config.values import AUTO_MODEL, ModelName, Port, Seconds, Section, SystemRole, WorkerUrl
from router.config.yaml_file import load_yaml

__all__ = [
    "AUTO_MODEL",
    "AffinityConfig",
    "AuthConfig",
    "CostConfig",
    "HealthConfig",
    "HeuristicScorerConfig",
    "LearnedScorerConfig",
    "LimitsConfig",
    "ListenConfig",
    "ModelConfig",
    "ModelName",
    "Port",
    "RecordedScorerConfig",
    "RouterConfig",
    "RouterSections",
    "RoutingConfig",
    "Seconds",
    "Section",
    "SessionsConfig",
    "StreamsConfig",
    "SystemRole",
    "UpstreamConfig",
    "WorkerUrl",
    "load_yaml",
]
