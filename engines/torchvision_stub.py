"""Lets `import torchvision` succeed beside a CPU-only torch.

SGLang imports torchvision for its image processors. The wheel that package indexes serve is built against CUDA: its C++
library does not load beside a CPU torch, and the import then fails because the schemas of two of its operators are
missing. Text models never call those operators, so on a CPU-only torch we declare the schemas and nothing else: calling
one still fails, with torch's "not implemented" error. On a CUDA torch this module does nothing.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Declares the two schemas at the moment torchvision is first looked up, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                for name in ("nms", "qnms"):
                    if not hasattr(torch.ops.torchvision, name):
                        torch.library.define(f"torchvision::{name}", _SCHEMA)
        return None


def install() -> None:
    """Put the declaration in place; doing it twice, or after torchvision was imported, changes nothing."""
    if "torchvision" not in sys.modules and not any(isinstance(f, _DeclareOperators) for f in sys.meta_path):
        sys.meta_path.insert(0, _DeclareOperators())
