from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from engines.models import prepare
from engines.models.loading import LoadedModel, load

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[3] / "var" / "models"


@pytest.fixture(scope="session")
def root() -> Path:
    """Prepared models that stay between runs; the first run downloads 93 MB."""
    return _ROOT


@pytest.fixture(scope="session")
def smollm2(root: Path) -> Path:
    return prepare("smollm2-135m-instruct", root)


@pytest.fixture(scope="module")
def smollm2_model(smollm2: Path) -> LoadedModel:
    return load(smollm2)


@pytest.fixture(scope="module")
def random_model(root: Path) -> LoadedModel:
    return load(prepare("tiny-llama", root))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and threads that spin beside another process's cost seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
