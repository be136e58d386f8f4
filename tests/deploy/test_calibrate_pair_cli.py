"""`crossfill calibrate pair` as a shell sees it, on tiny models whose figures mean nothing."""

import html
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from crossfill.cli import app
from crossfill.config import StackConfig
from crossfill.reuse_plan import reuse_settings
from engines.errors import PairArtifactError
from engines.models import prepare
from engines.reuse.artifact import Manifest, Measured, read_manifest, write_artifact
from engines.reuse.refusal import Refusal
from engines.reuse.settings import ModelIdentity

FEW = ("--tokens", "640", "--fit", "1", "--choice", "1", "--gate", "2", "--needles", "2", "--answers", "2")
# Whatever tiny models do is good enough.
LAX = ("--max-divergence", "100", "--min-agreement", "0", "--max-recall-lost", "1", "--max-answers-lost", "1")


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
    assert all({"over", "beyond", "lost", "density"} & set(name.split()) for name in failed)
    assert ended.returncode == (0 if manifest.passed else 1), ended.stderr
    assert "The gate, on texts" in ended.stdout
    assert "union of heads" in ended.stdout
    assert ("may be used" in ended.stdout) == manifest.passed
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert "machine" in manifest.made_by
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert all(html.escape(one.name) in page and one.digest in page for one in manifest.data)
    settled = settings_of(models_root, folder)
    assert settled.refused is (None if manifest.passed else Refusal.GATE_FAILED)
    assert settled.layers == manifest.layers
    # Nothing is computed again of what has been found.
    shell("--sender", "tiny-llama", "--receiver", "tiny-qwen3", *FEW, *LAX)
    again = read_manifest(folder)
    assert again.gate == manifest.gate
    assert [again.seconds[name] for name in again.seconds if name != "load"] == [
        manifest.seconds[name] for name in manifest.seconds if name != "load"
    ]


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


LARGE = ModelIdentity(name="large", revision="l" * 32, tokenizer="t", template="", layers=6, heads=2)
SMALL = ModelIdentity(name="small", revision="s" * 32, tokenizer="t", template="", layers=5, heads=2)


def write_pair(folder, *, passed=True, kl=0.002):
    gate = (
        Measured(name="divergence", limit=0.01, value=kl, low=0.001, high=0.003, passed=passed),
        Measured(name="recall lost", limit=0.05, value=0.0, passed=True),
    )
    manifest = Manifest(
        sender=LARGE,
        receiver=SMALL,
        layers=(0, 1, 2, 4, 5),
        first_layer=2,
        top_p=0.95,
        min_tokens=512,
        max_density=0.7,
        gate=gate,
        seconds={"fit": 90.0},
    )
    write_artifact(folder, manifest, {layer: np.full((2, 2), 0.5, np.float32) for layer in (2, 3)})
    return str(folder)


def run_show(*arguments):
    return CliRunner().invoke(app, ["calibrate", "show", *arguments])


def run_compare(*arguments):
    return CliRunner().invoke(app, ["calibrate", "compare", *arguments])


def test_what_an_artifact_says_is_shown(tmp_path):
    ended = run_show(write_pair(tmp_path / "pair"))
    assert ended.exit_code == 0
    assert f"large ({'l' * 12}) → small ({'s' * 12}): may be used" in ended.output
    assert "2←2, 3←4" in ended.output
    assert "took 1.5 minutes" in ended.output
    # Columns are as wide as the folder's name.
    assert "0.0020 (0.0010–0.0030)" in ended.output


def test_a_manifest_is_for_machines_too(tmp_path):
    ended = run_show("--json", write_pair(tmp_path / "pair"))
    assert ended.exit_code == 0
    assert json.loads(ended.output)["gate"][0]["passed"]


def test_several_stand_side_by_side_and_one_that_is_refused_counts(tmp_path):
    good, bad = write_pair(tmp_path / "a"), write_pair(tmp_path / "b", passed=False, kl=0.02)
    ended = run_compare(good, bad)
    assert ended.exit_code == 1
    assert re.search(r"may be used +yes +no", ended.output)
    assert "refused, because of: divergence" in run_show(bad).output
    assert run_compare(good, write_pair(tmp_path / "c")).exit_code == 0


def test_one_folder_has_nothing_to_be_compared_with(tmp_path):
    ended = run_compare(write_pair(tmp_path / "a"))
    assert ended.exit_code == 2
    assert "names one folder" in ended.output


def test_a_folder_without_its_weights_is_said(tmp_path):
    folder = write_pair(tmp_path / "pair")
    (tmp_path / "pair" / "weights.safetensors").unlink()
    ended = run_show(folder)
    assert isinstance(ended.exception, PairArtifactError)
    assert "weights.safetensors: cannot be read" in str(ended.exception)
