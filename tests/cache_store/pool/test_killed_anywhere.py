import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("dying.py")


@pytest.mark.parametrize(
    "operation", ["open", "allocate-free", "allocate-evict", "publish", "retrieve", "free", "recover", "close"]
)
def test_whatever_line_a_process_dies_at_every_slot_is_accounted_for(pool_name, operation):
    # A process of its own: this one may be large, and it forks for every line.
    command = [sys.executable, str(SCRIPT), pool_name, operation]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 20, "lines at which it died"
