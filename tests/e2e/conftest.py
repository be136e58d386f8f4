"""What end-to-end tests ask of other processes."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest


class Processes:
    """Looks at /proc."""

    @staticmethod
    def _all() -> dict[int, list[str]]:
        """Fields of `stat` from the state on, by pid: state, parent, group, …"""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name may hold spaces and brackets; the last bracket ends it.
                found[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
        return found

    def of_group(self, group: int) -> list[int]:
        """Processes of a group that still run."""
        return [pid for pid, fields in self._all().items() if int(fields[2]) == group and fields[0] != "Z"]

    def below(self, root: int) -> set[int]:
        """All descendants of a process."""
        family, size = {root}, 0
        while len(family) > size:
            size = len(family)
            family |= {pid for pid, fields in self._all().items() if int(fields[1]) in family}
        return family - {root}

    def running(self, pids: set[int]) -> list[int]:
        """Those of `pids` that have not ended."""
        return [pid for pid, fields in self._all().items() if pid in pids and fields[0] != "Z"]

    @staticmethod
    def eventually(condition: Callable[[], object], timeout_s: float) -> bool:
        """Whether `condition` becomes true in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.2)
        return False


@pytest.fixture
def processes() -> Processes:
    return Processes()
