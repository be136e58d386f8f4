"""Models that skip queries project what SGLang's own models do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.models import prepare


@pytest.fixture(scope="module")
def found(models_root):
    """What project.py prints, by model."""
    folder = prepare("tiny-llama", models_root)
    command = [sys.executable, str(Path(__file__).with_name("project.py")), str(folder)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", ["llama", "llama with biases", "qwen3", "ministral3"])
def test_parts_are_those_of_sglangs_own_forward(found, model):
    differs = found[model]["differs"]
    assert max(differs[part] for part in ("queries", "keys", "values", "whole")) < 1e-5
    assert differs["elsewhere"] > 0.1
    # Llama does nothing to queries but rotate them.
    assert (differs["unshaped"] > 0.1) == (not model.startswith("llama"))


@pytest.mark.parametrize("model", ["llama", "qwen3", "ministral3"])
def test_all_attention_of_our_models_skips_queries_and_none_of_sglangs(found, model):
    assert found[model]["ours"]
    assert found[model]["skips"]
    assert not found[model]["skips plain"]
