"""Documents that every machine with this environment has: descriptions of packages and documentation strings.

Not the text that judges models: held-out topics of the language reference are in no package's description, and a
document that shares a long run of words with them is left out.
"""

from __future__ import annotations

import ast
import importlib.metadata
import random
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from engines.models import texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MIN_CHARACTERS = 300
_MAX_CHARACTERS = 6000
_SHARED_WORDS = 12
_BADGE = re.compile(r"^\s*(\[?!\[|\.\. (image|_|\|)|:target:|<(img|a|p|div|h\d|/)|https?://\S+$)")


def documents(seed: int) -> list[str]:
    """Descriptions of installed packages and documentation strings of the standard library, in the order of `seed`."""
    heldout = _runs(texts.prose(texts.Part.HELDOUT))
    found = [*_descriptions(), *_docstrings(_standard_library())]
    clean = {text: None for text in found if not _runs(text) & heldout}
    kept = list(clean)
    random.Random(seed).shuffle(kept)
    return kept


def _descriptions() -> Iterator[str]:
    """The long description of each installed distribution, badges and links removed."""
    names = {str(found.metadata["Name"]).lower(): found for found in importlib.metadata.distributions()}
    for _, distribution in sorted(names.items()):
        # Long descriptions are a field in old metadata and the body in new one.
        text = str(distribution.metadata.json.get("description", ""))
        lines = [line for line in text.splitlines() if not _BADGE.match(line)]
        yield from _pieces("\n".join(lines))


def _docstrings(folders: Iterable[Path]) -> Iterator[str]:
    """One document a source file: the documentation strings in it, in order."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if {"test", "tests", "idlelib", "site-packages", "pydoc_data"} & set(path.relative_to(folder).parts):
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                # Some files of the standard library hold other encodings or broken code on purpose.
                continue
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            strings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
            yield from _pieces("\n\n".join(text for text in strings if text))


def _standard_library() -> list[Path]:
    return [Path(sysconfig.get_path("stdlib"))]


def _pieces(text: str) -> Iterator[str]:
    # A changelog of a thousand lines would otherwise fill a tenth of the sample.
    clean = text.strip()
    if len(clean) >= _MIN_CHARACTERS:
        yield clean[:_MAX_CHARACTERS]


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + _SHARED_WORDS]) for i in range(len(words) - _SHARED_WORDS + 1)}
