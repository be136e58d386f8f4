import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossfill_kernels.errors import NativeLibraryError
from crossfill_kernels.native import build, library

KERNEL_TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """The library with the address and undefined-behaviour sanitizers, every compiler warning an error."""
    folder = library.BUILD_FOLDER.with_name("_build_sanitized")
    build.build(folder, sanitize=True)
    return folder


def under_sanitizers(folder, *command):
    # With the C++ runtime beside it, since the sanitizer looks for `throw` before Python has loaded any C++.
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "CROSSFILL_TEST_NATIVE_FOLDER": str(folder),
            "LD_PRELOAD": " ".join(runtimes),
            # Python and torch keep memory to the end; that is no fault here.
            "ASAN_OPTIONS": "detect_leaks=0",
            "OMP_NUM_THREADS": "2",
        },
        check=False,
    )


@pytest.mark.parametrize(("compiler", "missing"), [(None, r"no C\+\+ compiler"), (sys.executable, "no cmake")])
def test_a_missing_program_is_named(monkeypatch, tmp_path, compiler, missing):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(NativeLibraryError, match=missing):
        build.build(tmp_path)


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeLibraryError, match="broken-c"):
        build.build(tmp_path)
    assert not (tmp_path / library.STAMP).exists()


def test_what_is_built_is_not_built_again(monkeypatch, sanitized):
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail(f"ran {command}"))
    build.build(sanitized, sanitize=True)


def test_what_is_built_without_sanitizers_is_built_again_with_them(monkeypatch, sanitized):
    commands = []
    monkeypatch.setattr(build, "_compile", lambda folder, *, sanitize: commands.append(sanitize))
    build.build(sanitized, sanitize=False)
    assert commands == [False]


def test_flags_of_the_environment_are_left_out(monkeypatch):
    monkeypatch.setenv("CXXFLAGS", "-ffast-math")
    seen = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, env, **_: seen.append(env) or subprocess.CompletedProcess(command, 0, "", "")
    )
    build._run(["cmake"])
    assert "CXXFLAGS" not in seen[0]
    assert seen[0]["PATH"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(NativeLibraryError, match="taken"):
        build.build(tmp_path / "taken" / "below")


def test_the_cpu_kernels_are_clean_under_sanitizers(sanitized):
    files = sorted(p for p in KERNEL_TESTS.glob("test_*.py") if "triton" not in p.name)
    # Those exchange the library themselves.
    chosen = "not reference_without"
    ran = under_sanitizers(
        sanitized, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files), "-k", chosen
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "failed" not in ran.stdout


READS_BEYOND = """
import torch
from crossfill_kernels.guided_attention.native import guided_attention_native
from crossfill_kernels.blocks import index_of
from crossfill_kernels.native import library
from crossfill_kernels.rows import newest_rows
rows = newest_rows(64, 64)
q, kv = torch.zeros(64, 2, 64), torch.zeros(40, 2, 64)
index = index_of(torch.ones(2, 1, 1, dtype=torch.bool), rows.blocks)
with library.replaced("generic", __import__("pathlib").Path({folder!r})):
    guided_attention_native(q, kv, kv, slice(0, 64), rows, index, scale=1.0, out=torch.empty_like(q))
"""


def test_the_sanitizer_is_awake(sanitized):
    """The control of the test above: past the checks, a context longer than its cache is read beyond."""
    ran = under_sanitizers(sanitized, "-c", READS_BEYOND.format(folder=str(sanitized)))
    assert ran.returncode != 0
    assert "AddressSanitizer" in ran.stderr
