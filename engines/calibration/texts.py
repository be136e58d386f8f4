"""Texts of a calibration: some to fit weights, others to choose by, and others again, of two sources, to judge by.

Without data of the user's own they come with Python: topics of the language reference that `help()` shows, and, as a
second source to judge by, the docstrings of its standard library.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engines.errors import CalibrationDataError
from engines.models.generation import token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_DIGEST_BYTES = 16
# Modules whose documentation is prose rather than lists of names.
_MODULES = (
    *("argparse", "asyncio.events", "collections", "concurrent.futures", "configparser", "csv", "datetime", "decimal"),
    *(
        "difflib",
        "doctest",
        "email.message",
        "fractions",
        "ftplib",
        "http.client",
        "http.cookiejar",
        "imaplib",
        "inspect",
    ),
    *("ipaddress", "json", "logging", "mailbox", "multiprocessing.pool", "optparse", "pathlib", "pickle", "random"),
    *("shutil", "smtplib", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading"),
    *("typing", "unittest.case", "unittest.mock", "urllib.request", "uuid", "weakref", "xml.dom.minidom", "zipfile"),
)


class Purpose(StrEnum):
    """What a text is used for; no text is used for two."""

    FIT = "fit"
    CHOICE = "choice"
    GATE = "gate"


@dataclass(frozen=True)
class Source:
    """Documents of one origin for one purpose."""

    purpose: Purpose
    name: str
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Passages:
    """Token ids of equally long texts cut from a source, and the digest of all of them."""

    purpose: Purpose
    name: str
    texts: tuple[tuple[int, ...], ...]
    digest: str


def built_in() -> tuple[Source, ...]:
    """What comes with Python: odd topics to fit and to choose by, even ones and docstrings to judge by."""
    topics = _topics()
    return (
        Source(Purpose.FIT, "Python language reference", tuple(topics[0::4])),
        Source(Purpose.CHOICE, "Python language reference, other topics", tuple(topics[2::4])),
        Source(Purpose.GATE, "Python language reference, held out", tuple(topics[1::2])),
        Source(Purpose.GATE, "Docstrings of Python's standard library", _docstrings()),
    )


def _topics() -> list[str]:
    """Some topics repeat paragraphs of others, which stay in the first one only."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    found = []
    for name in sorted(topics):
        fresh = [part for part in dict.fromkeys(topics[name].split("\n\n")) if part not in seen]
        seen.update(fresh)
        if fresh:
            found.append("\n\n".join(fresh))
    return found


def _docstrings() -> tuple[str, ...]:
    found = []
    for name in _MODULES:
        module = importlib.import_module(name)
        parts = [inspect.getdoc(module) or ""]
        for _, member in sorted(vars(module).items()):
            if inspect.isclass(member) and member.__module__ == name:
                own = (value for _, value in sorted(vars(member).items()) if inspect.isfunction(value))
                parts += [inspect.getdoc(member) or "", *(inspect.cleandoc(value.__doc__ or "") for value in own)]
        found.append("\n\n".join(part for part in parts if part))
    return tuple(found)


def read_sources(path: Path, tokenizer: Any) -> tuple[Source, ...]:
    """The user's own documents, dealt out: five of ten to fit, two to choose and three to judge by.

    A document that another one begins with, as the first turns of a conversation do, is left out, and so is one that is
    there twice: what is judged by would have been fitted to.

    Args:
        path: a text, whose parts between empty lines are documents; or JSONL of `{"text": str}` or
            `{"messages": [{"role": str, "content": str}, …]}`.
        tokenizer: whose chat template makes texts of messages.

    Raises:
        CalibrationDataError: the file cannot be read, a line is none of these, or there are too few documents.
    """
    try:
        # With or without the mark that some editors put first.
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationDataError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if path.suffix.lower() == ".jsonl":
        # Not `splitlines`: strings of JSON may hold U+2028 and other line ends as they are.
        lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
        documents = _apart(_document(path, number, line, tokenizer) for number, line in lines)
    else:
        documents = _apart(([part], part) for part in content.split("\n\n"))
    if len(documents) < 10:
        raise CalibrationDataError(f"{path}: has {len(documents)} different documents, ten are needed at the least")
    # In an order that depends on nothing but what they say.
    documents.sort(key=lambda text: hashlib.blake2b(text.encode(), digest_size=8).digest())
    dealt: dict[Purpose, list[str]] = {purpose: [] for purpose in Purpose}
    for number, document in enumerate(documents):
        purpose = Purpose.FIT if number % 10 < 5 else Purpose.CHOICE if number % 10 < 7 else Purpose.GATE
        dealt[purpose].append(document)
    return tuple(Source(purpose, path.name, tuple(own)) for purpose, own in dealt.items())


def _apart(documents: Iterable[tuple[Sequence[Any], str]]) -> list[str]:
    """Texts of those whose parts (turns, or the text itself) another one does not have or begin with."""
    # The list without its end, such that one that goes on begins so and stands right behind in the order of strings.
    keyed = {json.dumps(parts, separators=(",", ":"))[:-1] + ",": text for parts, text in documents if text.strip()}
    return [keyed[one] for one, after in pairwise((*sorted(keyed), "")) if not after.startswith(one)]


def _document(path: Path, number: int, line: str, tokenizer: Any) -> tuple[Sequence[Any], str]:
    """What a line is made of, and the text of it."""
    try:
        told = json.loads(line)
        # Half of a surrogate pair, as in `"\\ud800"`, is no text.
        json.dumps(told, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CalibrationDataError(f"{path}:{number}: not JSON of text: {error}") from error
    if isinstance(told, dict) and isinstance(text := told.get("text"), str):
        return [text], text
    messages = told.get("messages") if isinstance(told, dict) else None
    if not isinstance(messages, list) or not messages:
        raise CalibrationDataError(f"{path}:{number}: want an object with `text` or `messages`")
    try:
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:
        # Templates raise what they like.
        raise CalibrationDataError(f"{path}:{number}: the chat template refuses these messages: {error}") from error
    return messages, rendered


def cut(source: Source, tokenizer: Any, *, tokens: int, count: int, seed: int) -> Passages:
    """`count` texts of `tokens` tokens: the documents one after the other in an order of `seed`, cut.

    Raises:
        CalibrationDataError: the source is not long enough.
    """
    documents = list(source.documents)
    random.Random(seed).shuffle(documents)
    ids: list[int] = []
    for document in documents:
        ids += token_ids(tokenizer, f"{document}\n\n")
        if len(ids) >= tokens * count:
            break
    else:
        raise CalibrationDataError(
            f"{source.name}: has {len(ids)} tokens for `{source.purpose}`, {count} texts of {tokens} are needed"
        )
    texts = tuple(tuple(ids[begin : begin + tokens]) for begin in range(0, tokens * count, tokens))
    return Passages(source.purpose, source.name, texts, _digest(texts))


def _digest(texts: Sequence[Sequence[int]]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"crossfill-data")
    for text in texts:
        digest.update(len(text).to_bytes(8, "big"))
        for token in text:
            digest.update(token.to_bytes(4, "big"))
    return digest.hexdigest()
