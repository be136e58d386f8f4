"""What can go wrong while a model is made, sorted by who must act.

::

    EngineError
    └── ModelError
        ├── UnknownModelError         the caller: a name that is not in the catalogue
        ├── LayerChoiceError          the caller: layers to drop that the model does not have
        ├── DifferentTokenizersError  the caller: models that see the same text as different tokens
        ├── MissingDependencyError    the operator: a package or tool to install
        ├── DownloadError             the operator: network, proxy, or the package registry
        ├── DigestMismatchError       the operator: bytes differ from what is pinned or recorded
        ├── UnusableFolderError       the operator: a folder that is not a model that Crossfill made
        ├── StaleRunError             the operator: a folder with a training run that is not the one at hand
        ├── DivergedRunError          whoever made the plan: training ran away
        └── AdapterError              whoever made an adapter
            ├── AdapterFileError      the file cannot be read, or has a format of another version
            ├── AdapterBaseError      it was made for another base model
            └── AdapterTensorError    one of its tensors does not fit the format or the base model
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from engines.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class ModelError(EngineError):
    """Base of every error of this package; its text is one line that a user can act on."""


class UnknownModelError(ModelError):
    """A model name that the catalogue does not have; carries the nearest known name, if any is near."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        self.name = name
        self.suggestion = close[0] if close else None
        hint = f"did you mean {self.suggestion!r}?" if self.suggestion else f"known models: {', '.join(names)}"
        super().__init__(f"unknown model {name!r}; {hint}")


class LayerChoiceError(ModelError):
    """Layers to drop that are out of range, or that would leave no layer."""

    def __init__(self, layers: Iterable[int], layer_count: int) -> None:
        self.layers = tuple(layers)
        self.layer_count = layer_count
        super().__init__(f"cannot drop layers {list(self.layers)} of a model with layers 0..{layer_count - 1}")


class DifferentTokenizersError(ModelError):
    """Two model folders whose tokenizer or chat template differ, so that their figures would be of different texts."""

    def __init__(self, reference: Path, other: Path, what: str) -> None:
        self.reference = reference
        self.other = other
        self.what = what
        super().__init__(f"{other} has another {what} than {reference}; judge models with the same one side by side")


class MissingDependencyError(ModelError):
    """A package or tool is not installed; carries what it was needed for."""

    def __init__(self, package: str, purpose: str, remedy: str = "`pip install 'crossfill[cpu]'` brings it") -> None:
        self.package = package
        self.purpose = purpose
        super().__init__(f"{package} is needed to {purpose} and is not installed; {remedy}")


class DownloadError(ModelError):
    """A package could not be fetched; carries the requirement and the last lines of what the tool said."""

    def __init__(self, requirement: str, detail: str) -> None:
        self.requirement = requirement
        self.detail = detail
        super().__init__(f"could not download {requirement}: {detail}")


class DigestMismatchError(ModelError):
    """A file's bytes (or its recorded digest) are not the expected ones."""

    def __init__(self, path: Path, expected: str, found: str, remedy: str) -> None:
        self.path = path
        self.expected = expected
        self.found = found
        super().__init__(f"{path}: expected {expected}, found {found}; {remedy}")


class UnusableFolderError(ModelError):
    """A folder in the way, or a model folder without the files that this package reads."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class StaleRunError(ModelError):
    """A checkpoint that cannot be read, or comes from a run by another plan, text or base."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path} is damaged or comes from another run; give another folder, or delete this file")


class DivergedRunError(ModelError):
    """The loss of a training step is no number; `step` counts from 0."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.step = step
        super().__init__(f"{folder}: the loss of step {step} is no number; lower the learning rate of the plan")


class AdapterError(ModelError):
    """Base of what can be wrong with an adapter whose bytes are the ones that its maker wrote."""


class AdapterFileError(AdapterError):
    """A file that is no adapter, or an adapter in a format that this version does not know."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path} is not an adapter that this version can read: {reason}")


class AdapterBaseError(AdapterError):
    """An adapter made for another base model than the one at hand, by name or by the digest of its weights."""

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        self.expected = expected
        self.found = found
        super().__init__(f"the adapter was made for {expected}, this is {found}; {remedy}")


class AdapterTensorError(AdapterError):
    """A tensor that the format or the base model has no place for; `name` is that of the base's weight."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"the adapter's {name}: {reason}")
