import logging
import subprocess
import sys

import pytest
import torch

from crossfill_kernels.errors import NativeLibraryError
from crossfill_kernels.native import library


def fresh(monkeypatch, folder):
    monkeypatch.setattr(library, "BUILD_FOLDER", folder)
    monkeypatch.setattr(library, "_loader", library._Loader())


def test_the_fastest_runnable_variant_is_loaded():
    assert library.status().variant == library.runnable_variants()[0], library.status().reason


def test_a_missing_library_is_told_once_with_the_remedy(monkeypatch, tmp_path, caplog):
    fresh(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert library.load() is None
        assert library.load() is None
    assert len(caplog.records) == 1
    assert "was not built" in library.status().reason
    assert "python -m crossfill_kernels.native.build" in library.status().reason


def test_a_library_of_other_sources_is_not_loaded(monkeypatch, tmp_path):
    (tmp_path / library.STAMP).write_text("0" * 32 + "\nplain\n")
    fresh(monkeypatch, tmp_path)
    assert library.load() is None
    assert "other sources" in library.status().reason


def test_a_broken_library_is_not_loaded(monkeypatch, tmp_path):
    (tmp_path / f"libcrossfill_{library.runnable_variants()[0]}.so").write_bytes(b"no library")
    (tmp_path / library.STAMP).write_text(library.stamp_of(tmp_path))
    fresh(monkeypatch, tmp_path)
    assert library.load() is None
    assert "cannot be loaded" in library.status().reason


def test_a_library_that_was_cut_short_is_not_loaded(monkeypatch, tmp_path):
    path = tmp_path / f"libcrossfill_{library.runnable_variants()[0]}.so"
    path.write_bytes(b"no library")
    (tmp_path / library.STAMP).write_text(library.stamp_of(tmp_path))
    path.write_bytes(b"no lib")
    fresh(monkeypatch, tmp_path)
    assert library.load() is None
    assert "not to the end" in library.status().reason


@pytest.mark.parametrize("stamp", [b"", b"\xff\xfe", b"x" * 10000], ids=["empty", "no-text", "long"])
def test_any_other_stamp_is_not_trusted(monkeypatch, tmp_path, stamp):
    (tmp_path / library.STAMP).write_bytes(stamp)
    fresh(monkeypatch, tmp_path)
    assert library.load() is None


def test_a_function_without_a_library_says_why():
    function = library.Function("crossfill_paged_attention")
    with library.replaced(None), pytest.raises(NativeLibraryError, match="replaced"):
        function()


def test_threads_are_torchs():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert library.threads() == 3
    finally:
        torch.set_num_threads(before)


COUNTS_THREADS = """
import os, torch
from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import newest_rows
torch.set_num_threads(3)
torch.randn(4096, 512).softmax(dim=-1)
started = len(os.listdir("/proc/self/task"))
q, kv = torch.randn(512, 4, 64), torch.randn(512, 2, 64)
paged_attention(q, kv, kv, slice(0, 512), newest_rows(512, 512), scale=0.1, out=torch.empty_like(q))
print(started, len(os.listdir("/proc/self/task")))
"""


def test_the_library_runs_on_torchs_own_threads():
    ran = subprocess.run([sys.executable, "-c", COUNTS_THREADS], capture_output=True, text=True, check=True)
    started, after = map(int, ran.stdout.split())
    assert started >= 3
    assert after == started
