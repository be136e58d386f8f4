"""`manifest.json`: what a prepared folder holds, so that it can be recognised without reading its weights again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.models.errors import DigestMismatchError, UnusableFolderError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

MANIFEST_FILE = "manifest.json"
FORMAT = 1
_CHUNK_BYTES = 1 << 20
_REMEDY = "build it again with `crossfill models prepare --rebuild`"


@dataclass(frozen=True)
class FileRecord:
    """One file as it was when the model was made."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one model, by name."""

    name: str
    files: Mapping[str, FileRecord]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.size_bytes for record in self.files.values())


def sha256_of(path: Path, on_bytes: Callable[[int, int], None] | None = None) -> str:
    """Hex SHA-256 of a file; `on_bytes(done, total)` after each MiB."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if on_bytes:
                on_bytes(done, total)
    return digest.hexdigest()


def take(name: str, folder: Path) -> Manifest:
    """Hash every file of `folder` (no subfolders)."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST_FILE)
    return Manifest(name, {path.name: FileRecord(path.stat().st_size, sha256_of(path)) for path in files})


def write(manifest: Manifest, folder: Path) -> None:
    """Write `manifest` into `folder`."""
    files = {
        name: {"sha256": record.sha256, "size_bytes": record.size_bytes} for name, record in manifest.files.items()
    }
    value = {"files": files, "format": FORMAT, "name": manifest.name}
    (folder / MANIFEST_FILE).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read(folder: Path) -> Manifest:
    """The manifest of `folder`.

    Raises:
        UnusableFolderError: there is none, or it is not one that this version wrote.
    """
    try:
        value = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise UnusableFolderError(folder, f"its manifest has format {value['format']}, not {FORMAT}; {_REMEDY}")
        files = {name: FileRecord(int(f["size_bytes"]), str(f["sha256"])) for name, f in value["files"].items()}
        return Manifest(str(value["name"]), files)
    except FileNotFoundError as error:
        raise UnusableFolderError(folder, f"not made by Crossfill: no {MANIFEST_FILE}; move it away") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableFolderError(folder, f"its {MANIFEST_FILE} cannot be read ({error!r}); {_REMEDY}") from error


def check(manifest: Manifest, folder: Path, pinned: Mapping[str, str]) -> None:
    """Check `folder` without reading any weights: recorded digests against `pinned`, sizes against the disk.

    Raises:
        DigestMismatchError: a recorded digest is not the pinned one, or a file is missing or has another size.
    """
    for file_name, expected in pinned.items():
        record = manifest.files.get(file_name)
        found = record.sha256 if record else "no such file"
        if found != expected:
            raise DigestMismatchError(folder / file_name, f"sha256 {expected}", found, _REMEDY)
    for file_name, record in manifest.files.items():
        path = folder / file_name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
        if found != f"{record.size_bytes} bytes":
            raise DigestMismatchError(path, f"{record.size_bytes} bytes", found, _REMEDY)


def verify(manifest: Manifest, folder: Path, on_bytes: Callable[[int, int], None] | None = None) -> None:
    """Hash every file of `folder` again.

    Raises:
        DigestMismatchError: a file's bytes changed since the model was made.
    """
    for file_name, record in manifest.files.items():
        found = sha256_of(folder / file_name, on_bytes)
        if found != record.sha256:
            raise DigestMismatchError(folder / file_name, f"sha256 {record.sha256}", found, _REMEDY)
