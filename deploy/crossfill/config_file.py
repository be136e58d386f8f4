"""Configuration files of both kinds: which kind one is, whether all that it names can be used, and what it comes to."""

import difflib
from pathlib import Path
from typing import Any, Literal

from crossfill.config import StackConfig, StackModel
from router.config import ModelConfig, RouterConfig, RouterSections, load_yaml
from router.config.yaml_file import read_mapping
from router.decision.decider import build_scorer
from router.errors import JsonObject
from router.tenants.keyring import open_keyrings

Kind = Literal["stack", "router"]
KINDS: dict[Kind, type[StackConfig] | type[RouterConfig]] = {"stack": StackConfig, "router": RouterConfig}

_MODEL_KEYS = tuple({**StackModel.model_fields, **ModelConfig.model_fields})


def load_any(path: Path) -> StackConfig | RouterConfig:
    """Read a stack's file or a router's. Raises ConfigError, in the words of the kind that the file looks like."""
    return load_yaml(path, KINDS[_kind_of(read_mapping(path))])


def kind_of(config: RouterSections) -> Kind:
    """What the file of this configuration is called."""
    return "stack" if isinstance(config, StackConfig) else "router"


def check_files(config: RouterSections) -> None:
    """Build what needs the files that `config` names. Raises ConfigError if one of them cannot be used."""
    build_scorer(config.routing)
    open_keyrings(config.auth)


def effective(config: StackConfig | RouterConfig) -> JsonObject:
    """The whole configuration, every default filled in; as a file it would mean the same.

    But for a password in the store's URL, which is not shown.
    """
    dumped: JsonObject = config.model_dump(mode="json")
    dumped["store"] = {**config.store.model_dump(mode="json"), "url": config.store.shown_url}
    if isinstance(config, StackConfig):
        dumped["models"] = [_effective_model(config, model) for model in config.models]
    return dumped


def schema_of(kind: Kind) -> JsonObject:
    """The JSON Schema (draft 2020-12) of a file of this kind."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **KINDS[kind].model_json_schema()}


def _effective_model(config: StackConfig, model: StackModel) -> JsonObject:
    if model.source is None:
        return model.model_dump(mode="json", exclude={"source", "replicas", "worker"})
    dumped: JsonObject = model.model_dump(mode="json", exclude={"urls"})
    dumped["worker"] = config.worker_settings(model).model_dump(mode="json")
    return dumped


def _kind_of(data: dict[Any, Any]) -> Kind:
    """A router's file gives its models `workers`; a misspelt `worker` or `workers` counts as the nearer of the two."""
    models = data.get("models")
    keys = (
        [str(key) for model in models if isinstance(model, dict) for key in model] if isinstance(models, list) else []
    )
    near = [close[0] for key in keys if (close := difflib.get_close_matches(key, _MODEL_KEYS, n=1))]
    served, started = near.count("workers"), near.count("source") + near.count("urls")
    return "router" if served and served >= started else "stack"
