"""Values of a configuration that have a check of their own, and what its sections have in common."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

AUTO_MODEL = "auto"

SystemRole = Literal["system", "native", "user"]
"""What becomes of `system` and `developer` turns on their way to a model."""

Value = TypeVar("Value")

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}", re.ASCII)


def check_model_name(name: str) -> str:
    """`name`, if a model can be called that; raises ValueError."""
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


def repeated(values: list[Value]) -> Value | None:
    """The first value that was there before; None if there is none."""
    return next((value for index, value in enumerate(values) if value in values[:index]), None)


ModelName = Annotated[str, AfterValidator(check_model_name)]
WorkerUrl = Annotated[str, AfterValidator(_check_worker_url)]
ConfigPath = Annotated[Path, AfterValidator(_from_config_folder)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A part of a configuration: frozen, unknown keys forbidden."""

    # A value may be a secret, and what pydantic says of a fault may reach a log.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)
