from __future__ import annotations

import copy
import sys
import sysconfig
from typing import TYPE_CHECKING

import pytest

from engines.models import prepare
from engines.models.healing import corpus
from engines.models.loading import LoadedModel, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny(root: Path) -> Path:
    return prepare("tiny-llama", root)


@pytest.fixture(scope="session")
def whole(tiny: Path) -> LoadedModel:
    """A random model of four layers; no test changes it."""
    loaded = load(tiny)
    loaded.model.requires_grad_(False)
    return loaded


@pytest.fixture
def duplicate(whole: LoadedModel) -> Callable[[], LoadedModel]:
    """Makes models that compute what `whole` does, for a test to change."""
    return lambda: LoadedModel(copy.deepcopy(whole.model), whole.tokenizer)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the standard library; a folder `site` beside it for what is installed."""
    folder = tmp_path / "library"
    folder.mkdir()
    monkeypatch.setattr(corpus, "_standard_library", lambda: [folder])
    standard = sysconfig.get_path("stdlib")
    modules = [path for path in sys.path if path.startswith(standard) and "site-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *modules])
    return folder
