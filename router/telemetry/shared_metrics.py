"""Metrics of several processes as one: each writes its series to files of its own, whoever is asked sums them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.multiprocess import mark_process_dead as _mark_dead

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prometheus_client import Metric

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where prometheus_client looks for the folder; must be set in a process before it starts."""


class SharedRegistry(CollectorRegistry):
    """Takes the series of the process in `slot` and shows those of all processes that share `folder`.

    Files are named by slot and not, as is usual, by pid: a process that is started again goes on with the counters of
    the one before it, so that no sum ever falls and the files do not grow in number. At most one process may have a
    slot at a time. Must be made before the first series of the process, and once.
    """

    def __init__(self, folder: Path, slot: int) -> None:
        super().__init__()
        self._folder = folder
        values.ValueClass = values.MultiProcessValue(lambda: slot)  # type: ignore[no-untyped-call]  # has no types

    def collect(self) -> Iterable[Metric]:
        """The series of all processes; those of this process alone are never shown."""
        # A file without a byte belongs to a process that is just starting.
        files = [str(path) for path in self._folder.glob("*.db") if _size_bytes(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]  # has no types
        return merged


def forget_gauges(folder: Path, slot: int) -> None:
    """The process in `slot` has ended: what it had in flight and saw no longer counts; its counters do."""
    _mark_dead(slot, str(folder))  # type: ignore[no-untyped-call]  # has no types


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
