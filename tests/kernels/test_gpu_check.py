import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "kernels/benchmarks"
OPS = {
    "anchor_distance",
    "block_mass",
    "block_mass_sampled",
    "guided_attention",
    "lowrank_correct",
    "map_attention",
    "mix_mass",
    "pack_map",
    "quantise_mass",
    "ridge_correct",
    "rope_rerotate",
    "select_blocks",
}


def run(*arguments, out, **environment):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OUT": str(out), **environment},
    )


@pytest.fixture
def correctness(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_correctness")


@pytest.fixture
def timing(correctness):
    return importlib.import_module("gpu_timing")


def test_interpreted_it_checks_and_times_every_op(tmp_path):
    done = run("--interpret", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "gpu_check.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    checked = [row for row in rows if row["kind"] == "worst ÷ tolerance"]
    assert {row["op"] for row in checked} == OPS
    assert all(float(row["figure"]) <= 1 for row in checked)
    timed = {row["op"] for row in rows if row["kind"] == "ms" and float(row["figure"]) > 0}
    assert timed == OPS | {"torch SDPA"}


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = run(out=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("There is no CUDA GPU here")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_wrong_kernel_is_found(triton_device, correctness, monkeypatch):
    kernels = importlib.import_module("crossfill_kernels.guided_attention.triton")
    right = kernels.guided_attention_triton

    def wrong(*arguments, out, **options):
        right(*arguments, out=out, **options)
        out[0, 0, 0] += 0.05

    shape = correctness.shapes(small=True)[1]
    inputs = correctness.make_inputs(shape, triton_device)
    assert all(check.passed for check in checks_of(correctness, shape, inputs))
    monkeypatch.setattr(kernels, "guided_attention_triton", wrong)
    assert not any(check.passed for check in checks_of(correctness, shape, inputs))


def checks_of(correctness, shape, inputs):
    with correctness.dispatch.forced("triton"):
        return list(correctness._guided(shape, inputs))


def test_what_is_not_written_is_wrong(correctness):
    nan = torch.full((2,), float("nan"))
    assert not correctness.Check("op", "case", correctness.difference(nan, torch.zeros(2), 1e-2)).passed


def test_what_is_wrong_is_not_timed(triton_device, correctness, timing, monkeypatch):
    shape = correctness.Shape(1, 1, 16, 64, 64, torch.float32, paged=False)
    given = timing.Plan((shape,), (), peers=False)
    kernels = importlib.import_module("crossfill_kernels.block_mass.triton")
    right = kernels.block_mass_triton

    def wrong(*arguments, out, **options):
        mass = right(*arguments, out=out, **options)
        out[-1] = 7.0
        return mass

    monkeypatch.setattr(kernels, "block_mass_triton", wrong)
    rows = {row.op: row for row in timing.time_shape(shape, given, triton_device, lambda run: 1e-3)}
    assert rows["block_mass"].ms is None
    assert rows["block_mass"].note.startswith("wrong")
    assert rows["select_blocks"].ms == 1.0


def test_a_peer_that_fails_says_why(correctness, timing):
    def fail():
        raise RuntimeError("no kernel for this")

    empty = timing.Timing("", "", "1/1", 64, None, None)
    row = timing._peer("peer", "dense", fail, None, empty, lambda op, case, run, density: run())
    assert row.ms is None
    assert row.note == "RuntimeError: no kernel for this"
