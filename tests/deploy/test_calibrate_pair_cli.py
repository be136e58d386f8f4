"""`crossfill calibrate pair` as a shell sees it, on tiny models whose figures mean nothing."""

import re
import subprocess
import sys

import pytest

from crossfill.config import StackConfig
from crossfill.reuse_plan import reuse_settings
from engines.models import prepare
from engines.reuse.artifact import read_manifest
from engines.reuse.refusal import Refusal

FEW = ("--tokens", "640", "--fit", "1", "--choice", "1", "--gate", "2", "--needles", "2")
# Whatever tiny models do is good enough.
LAX = ("--max-divergence", "100", "--min-agreement", "0", "--max-recall-lost", "1")


@pytest.fixture
def shell(models_root, tmp_path):
    for name in ("tiny-llama", "tiny-qwen3"):
        prepare(name, models_root)

    def run(*arguments):
        command = [
            sys.executable,
            "-m",
            "crossfill",
            "calibrate",
            "pair",
            "--models-root",
            str(models_root),
            *arguments,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)

    return run


def settings_of(models_root, folder):
    models = [{"name": name, "source": name} for name in ("tiny-llama", "tiny-qwen3")]
    pair = {"sender": "tiny-llama", "receiver": "tiny-qwen3", "artifact": str(folder)}
    config = StackConfig.model_validate({"models": models, "reuse": {"pairs": [pair]}})
    told = reuse_settings(config, {name: models_root / name for name in ("tiny-llama", "tiny-qwen3")})
    return told["tiny-qwen3"].pairs[0]


def test_what_the_gate_says_is_shown_written_and_kept_to(shell, models_root, tmp_path):
    ended = shell("--sender", "tiny-llama", "--receiver", "tiny-qwen3", *FEW, *LAX)
    folder = tmp_path / "var/pairs/tiny-llama--tiny-qwen3"
    manifest = read_manifest(folder)
    # Random models may be no better than a mask of the nearest blocks.
    failed = {one.name for one in manifest.gate if not one.passed}
    assert failed <= {"over random", "over sink + window", "density"}
    assert ended.returncode == (0 if manifest.passed else 1), ended.stderr
    assert "The gate, on texts" in ended.stdout
    assert ("may be used" in ended.stdout) == manifest.passed
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert "machine" in manifest.made_by
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert all(one.name in page and one.digest in page for one in manifest.data)
    settled = settings_of(models_root, folder)
    assert settled.refused is (None if manifest.passed else Refusal.GATE_FAILED)
    assert settled.layers == manifest.layers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sender", "nowhere", "--receiver", "tiny-qwen3"), "nowhere"),
        (("--sender", "tiny-llama", "--receiver", "tiny-qwen3", "--tokens", "650"), "multiple of 64"),
        (
            ("--sender", "tiny-llama", "--receiver", "tiny-qwen3", "--data", "missing.txt"),
            "missing.txt: cannot be read",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(shell, arguments, said):
    ended = shell(*arguments)
    assert ended.returncode in {1, 2}
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
