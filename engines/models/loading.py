"""Prepared folders in transformers, for measuring on a CPU."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines import torchvision_stub
from engines.models.errors import MissingDependencyError, UnusableFolderError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model on the CPU, in inference mode, and its tokenizer.

    In float32 as `load` makes it; healing turns it into bfloat16 where the CPU multiplies that faster.

    `model` and `tokenizer` are transformers objects, which ship no types that hold under strict checking.
    """

    model: Any
    tokenizer: Any

    @property
    def layers(self) -> Any:
        """The decoder layers, a torch ModuleList."""
        return self.model.model.layers


def load(folder: Path) -> LoadedModel:
    """Load the model of `folder` (Llama or Qwen3).

    float32, because bfloat16 is several times slower on CPUs without bfloat16 instructions, and because its rounding
    would blur small differences between models.

    Raises:
        MissingDependencyError: torch or transformers is not installed.
        UnusableFolderError: there is no config.json.
    """
    if not (folder / "config.json").is_file():
        raise UnusableFolderError(folder, "no config.json; give a model of the catalogue or the folder of one")
    transformers = import_transformers("load a model")
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return LoadedModel(model.eval(), tokenizer)


def import_transformers(purpose: str) -> ModuleType:
    """Transformers, with torch under it; `purpose` completes "torch and transformers is needed to …".

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    # Transformers imports torchvision for text models too.
    torchvision_stub.install()
    try:
        importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError("torch and transformers", purpose) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
