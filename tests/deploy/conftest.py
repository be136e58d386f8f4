import os
import subprocess
import sys

import pytest


@pytest.fixture
def crossfill():
    """Run the program to its end: `crossfill("keys", "list", NAME=value)`, the names being environment variables."""
    # As from a shell: neither the test session's own choice of platform nor its width.
    inherited = {name: value for name, value in os.environ.items() if name not in {"SGLANG_PLATFORM", "COLUMNS"}}

    def run(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "crossfill", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=inherited | environment,
        )

    return run
