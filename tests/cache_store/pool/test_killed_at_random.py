"""Eight processes use a small pool and are killed at random. CROSSFILL_POOL_SOAK_S makes it last longer than 10 s."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("traffic.py")
SECONDS = float(os.environ.get("CROSSFILL_POOL_SOAK_S", "10"))


def run_traffic(name, folder, mode, seconds):
    arguments = [sys.executable, str(SCRIPT), name, str(seconds), "1", mode, str(folder)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=seconds + 120, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["faults"] == 0, run.stderr
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    name = f"test-traffic-{os.getpid()}"
    try:
        yield run_traffic(name, tmp_path_factory.mktemp("traffic"), "checked", SECONDS)
    finally:
        Path(f"/dev/shm/crossfill-pool-{name}").unlink(missing_ok=True)


def test_everything_happened(report):
    # Otherwise what follows would say nothing.
    wanted = (
        "killed",
        "published",
        "used",
        "stale_before",
        "stale_after",
        "refused",
        "given_up",
        "recovered",
        "evicted",
    )
    assert all(report[what] > 0 for what in wanted), report


def test_no_stale_block_was_used(report):
    assert report["wrong_blocks_used"] == 0


def test_no_slot_had_two_writers(report):
    assert report["blocks_of_two_writers"] == 0


def test_no_slot_leaked(report):
    assert report["left_writing"] == 0
    assert report["left_whole"] == report["slots_to_be_had"] == report["slots"]


def test_memory_and_seats_stayed_bounded(report):
    assert report["file_bytes"] == report["size_bytes"]
    assert report["most_seats"] <= 9
    assert report["left_processes"] == 1


def test_readers_that_do_not_check_again_use_stale_blocks(pool_name, tmp_path):
    report = run_traffic(pool_name, tmp_path, "unchecked", 4)
    assert report["wrong_blocks_used"] > 0
    assert report["blocks_of_two_writers"] == 0
