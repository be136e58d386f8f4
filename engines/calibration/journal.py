"""What steps of a calibration found, kept so that one that was ended goes on where it was.

A result is found again by everything that it follows from: models, texts and settings of that very step. So a run with
other limits or more texts takes over what still holds, and nothing that does not. Deleting the folder starts anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
import zipfile
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from engines.errors import CalibrationDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    Found = Mapping[str, npt.NDArray[np.generic]]

_log = logging.getLogger("crossfill.calibration")
_DIGEST_BYTES = 16
# Not a name that a result can have.
_SECONDS = "seconds of work"
_UNFINISHED = "unfinished"


class Journal:
    """Results by step, and the seconds of work in each, those of earlier runs included.

    Args:
        folder: of results; without one nothing is kept.
        common: what all results follow from.
    """

    def __init__(self, folder: Path | None = None, common: object = None) -> None:
        self._folder = folder
        self._common = common
        self.seconds: dict[str, float] = {}
        self.taken_over = 0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure work that is done anew in every run."""
        started_s = time.perf_counter()
        yield
        self._count(name, time.perf_counter() - started_s)

    def get(self, step: str, given: object, find: Callable[[], Found]) -> Found:
        """What `find` finds, or found in an earlier run.

        Args:
            step: its name.
            given: what the result follows from, as JSON can say it.
            find: names and arrays; no arrays of objects.

        Raises:
            CalibrationDataError: the result cannot be written.
        """
        path = self._path(step, given)
        kept = None if path is None else _read(path)
        if kept is not None:
            self.taken_over += 1
            self._count(step, float(kept.pop(_SECONDS)))
            return kept
        before_s, started_s = self.seconds.get(step, 0.0), time.perf_counter()
        found = dict(find())
        self._count(step, time.perf_counter() - started_s)
        if path is not None:
            # With what `find` itself took over of a run that was ended.
            _write(path, {**found, _SECONDS: np.asarray(self.seconds[step] - before_s)})
        return found

    def take_up(self, step: str, given: object) -> Found | None:
        """What `leave` left of a step that was ended, whose seconds count; None if there is nothing."""
        path = self._path(step, [_UNFINISHED, given])
        kept = None if path is None else _read(path)
        if kept is not None:
            self._count(step, float(kept.pop(_SECONDS)))
        return kept

    def leave(self, step: str, given: object, found: Found, seconds: float) -> None:
        """Keep where a step is that `seconds` were worked on in all, in the place of what was left of it before.

        Raises:
            CalibrationDataError: it cannot be written.
        """
        path = self._path(step, [_UNFINISHED, given])
        if path is not None:
            _write(path, {**found, _SECONDS: np.asarray(seconds)})

    def _count(self, step: str, seconds: float) -> None:
        self.seconds[step] = self.seconds.get(step, 0.0) + seconds

    def _path(self, step: str, given: object) -> Path | None:
        if self._folder is None:
            return None
        told = json.dumps([step, self._common, given], sort_keys=True, allow_nan=False)
        digest = hashlib.blake2b(told.encode(), digest_size=_DIGEST_BYTES, person=b"crossfill-step").hexdigest()
        return self._folder / f"{step.replace(' ', '-')}-{digest}.npz"


def digest_of(arrays: Mapping[int, npt.NDArray[np.generic]]) -> str:
    """Of matrices by layer, for what follows from them."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"crossfill-step")
    for layer, matrix in sorted(arrays.items()):
        digest.update(f"{layer} {matrix.dtype} {matrix.shape} ".encode())
        digest.update(np.ascontiguousarray(matrix).tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, npt.NDArray[np.generic]] | None:
    try:
        # Arrays of objects would run code.
        with np.load(path, allow_pickle=False) as kept:
            found = {name: kept[name] for name in kept.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        _log.warning("%s: is not usable and is made anew: %s", path, error)
        return None
    return found if _SECONDS in found else None


def _write(path: Path, found: Found) -> None:
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **found)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.getvalue())
        partial.replace(path)
    except OSError as error:
        # What a full disk took of it would only fill it further.
        with suppress(OSError):
            partial.unlink()
        raise CalibrationDataError(f"{path}: cannot be written: {error.strerror}") from error
