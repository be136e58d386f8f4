"""How a worker process is started; free of torch and SGLang, so that the command line and `crossfill up` stay quick."""

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from engines.config import WorkerConfig
from engines.errors import WorkerConfigError


def command(config: WorkerConfig) -> list[str]:
    """The command line that runs this worker in a process of its own.

    Raises:
        WorkerConfigError: the settings cannot work, found before the slow start-up.
    """
    if foreign := config.foreign_options():
        raise WorkerConfigError(
            f"extra_args may not set {', '.join(foreign)}: Crossfill sets it from the worker's own settings"
        )
    if config.device == "cuda" and not _has_nvidia_driver():
        raise WorkerConfigError("device is cuda, but this machine has no NVIDIA driver (libcuda.so.1); use cpu")
    path = Path(config.model_path)
    # `org/name` may be a hub id; anything that looks like a path must exist.
    if (path.is_absolute() or config.model_path.startswith(".") or len(path.parts) != 2) and not path.is_dir():
        raise WorkerConfigError(
            f"model folder {config.model_path} does not exist (`crossfill models list` shows names that can be made)"
        )
    # -P: else a file in the working folder would be taken for a module.
    return [sys.executable, "-P", "-m", "engines.worker", *config.sglang_args()]


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def environment(config: WorkerConfig, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The whole environment of this worker's process: `base` plus what the worker needs."""
    return {**base, **config.environment()}
