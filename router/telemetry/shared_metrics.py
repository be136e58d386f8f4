"""Metrics of one process, or of several as one: each writes its series to own files, whoever is asked sums them all.

prometheus_client asks the environment which of the two it is, when it is imported. A registry here decides instead,
and must be made before the first series of the process, and once.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.multiprocess import mark_process_dead as _mark_dead

from router.errors import ConfigError, MetricsLostError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prometheus_client import Metric

_log = logging.getLogger("crossfill.metrics")

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where prometheus_client looks for the folder; must be set in a process before it starts."""


class OwnRegistry(CollectorRegistry):
    """The series of the only process, in its memory, and those about the process."""

    def __init__(self) -> None:
        super().__init__()
        values.ValueClass = values.MutexValue
        # A second series for each one, with the time of its birth, would be noise here.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # has no types
        ProcessCollector(registry=self)


class SharedRegistry(CollectorRegistry):
    """Takes the series of the process in `slot` and shows those of all processes that share `folder`.

    Files are named by slot and not, as is usual, by pid: a process that is started again goes on with the counters of
    the one before it, so that no sum ever falls and the files do not grow in number. At most one process may have a
    slot at a time. A folder that something has removed is made again.

    Raises ConfigError if `folder` is not ours to write in.
    """

    def __init__(self, folder: Path, slot: int, processes: int) -> None:
        super().__init__()
        _make(folder)
        self._folder = folder
        self._processes = processes
        values.ValueClass = values.MultiProcessValue(lambda: slot)  # type: ignore[no-untyped-call]  # has no types

    def collect(self) -> Iterable[Metric]:
        """The series of all processes; those of this process alone are never shown.

        Raises MetricsLostError if the files of a process were removed: it goes on writing where nobody can read.
        """
        lost = [slot for slot in range(self._processes) if not _counters(self._folder, slot).exists()]
        if lost:
            _log.error("%s: the files of process %s were removed", self._folder, ", ".join(map(str, lost)))
            raise MetricsLostError(lost)
        # A file without a byte belongs to a process that is just starting.
        files = [str(path) for path in self._folder.glob("*.db") if _size_bytes(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]  # has no types
        return merged


def reserve_files(folder: Path, processes: int) -> None:
    """Note that each of `processes` processes has files here, or is about to: one without was robbed of them."""
    for slot in range(processes):
        _counters(folder, slot).touch(mode=0o600)


def forget_gauges(folder: Path, slot: int) -> None:
    """The process in `slot` has ended: what it had in flight and saw no longer counts; its counters do."""
    _mark_dead(slot, str(folder))  # type: ignore[no-untyped-call]  # has no types


def _counters(folder: Path, slot: int) -> Path:
    """The file that every process has from its start to its end and leaves to the next one."""
    return folder / f"counter_{slot}.db"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
        _log.error("%s was removed and is made again", folder)
    except FileExistsError:
        # Its name was for all to see, and whoever took it meanwhile could lead our files to others of ours.
        if folder.lstat().st_uid != os.geteuid():
            raise ConfigError(f"{folder}: was removed, and is somebody else's now") from None
    except OSError as error:
        raise ConfigError(f"{folder}: was removed, and cannot be made again: {error.strerror}") from error


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
