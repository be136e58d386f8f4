"""What YAML can say and a configuration cannot: refused by file, line and key, before anything is made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from router.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# As written out, each alias counting as what it stands for: a few lines of aliases can stand for billions.
_MOST_NODES = 100_000

# Far beyond any configuration, and below what JSON libraries read.
_MOST_LEVELS = 64

_YAML_TAG = "tag:yaml.org,2002:"
_MERGE_TAG = f"{_YAML_TAG}merge"
_TEXT_TAG = f"{_YAML_TAG}str"
_PLAIN_TAGS = (f"{_YAML_TAG}seq", f"{_YAML_TAG}map")


@dataclass(frozen=True, slots=True)
class _Place:
    """A node and the way to it; its line is that of its key, where it has one."""

    node: yaml.Node
    line: int
    level: int = 0
    above: _Place | None = None
    part: str | int = ""

    def below(self, part: str | int, node: yaml.Node, named_by: yaml.Node) -> _Place:
        return _Place(node, named_by.start_mark.line + 1, self.level + 1, self, part)

    @property
    def key(self) -> str:
        parts: list[str] = []
        place = self
        while place.above is not None:
            parts.append(str(place.part))
            place = place.above
        dotted = ".".join(reversed(parts))
        return dotted if dotted.isprintable() else repr(dotted)


def check_nodes(path: Path, root: yaml.Node | None) -> None:
    """Raise ConfigError for the first thing that a configuration cannot hold.

    That is: too many nodes or levels; a key given twice, of which YAML would keep the last without a word, or a key
    that is no text; a set, bytes or another value that JSON lacks; a number that is not finite or beyond 64 bits; a
    text that is not Unicode, or has a null character, which no path, host or argument can hold.
    """
    waiting = [_Place(root, root.start_mark.line + 1)] if root is not None else []
    seen = len(waiting)
    while waiting:
        place = waiting.pop()
        if place.level > _MOST_LEVELS:
            raise ConfigError(f"{path}:{place.line}: is nested too deep")
        if (fault := _fault(place)) is not None:
            raise ConfigError(f"{path}:{place.line}: " + ": ".join(filter(None, (place.key, fault))))
        if isinstance(place.node, yaml.CollectionNode):
            # Counted before they are gathered: each of many aliases may stand for a list of as many.
            seen += len(place.node.value)
            if seen > _MOST_NODES:
                raise ConfigError(f"{path}: has more than {_MOST_NODES} nodes, aliases written out")
            # The last of a list is taken first; what comes first in the file is told.
            waiting.extend(reversed(list(_children(path, place))))


def _children(path: Path, place: _Place) -> Iterator[_Place]:
    node = place.node
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield place.below(index, item, item)
    elif isinstance(node, yaml.MappingNode):
        # A mapping or a list as a key is left to the YAML library, which knows no such keys either.
        pairs = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
        _check_keys(path, [key for key, _ in pairs])
        for key, value in pairs:
            yield place.below(key.value, value, key)


def _check_keys(path: Path, keys: list[yaml.ScalarNode]) -> None:
    names: set[str] = set()
    for key in keys:
        fault = None
        if key.value in names:
            fault = "is there twice"
        elif key.tag != _MERGE_TAG:
            text = key.tag == _TEXT_TAG
            fault = _text_fault(key.value) if text else "is not a text; if it is meant as one, quote it"
        if fault is not None:
            raise ConfigError(f"{path}:{key.start_mark.line + 1}: the key {key.value!r} {fault}")
        names.add(key.value)


def _fault(place: _Place) -> str | None:
    node = place.node
    if isinstance(node, yaml.ScalarNode):
        return _scalar_fault(node)
    # Tags that are not YAML's own are refused by the YAML library.
    foreign = node.tag.startswith(_YAML_TAG) and node.tag not in _PLAIN_TAGS
    return _no_value(node) if foreign else None


def _scalar_fault(node: yaml.ScalarNode) -> str | None:
    try:
        value = _scalar(node)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        # What the YAML library lets through when a text does not fit its tag, as in `!!int x`.
        return f"not valid YAML: {' '.join(str(error).split())}"
    match value:
        case float() if not math.isfinite(value):
            return f"must be a finite number, not {value}"
        case int() if not -(2**63) <= value < 2**63:
            return "must be a number of at most 64 bits"
        case str():
            return _text_fault(value)
        case bytes():
            return _no_value(node)
    return None


def _text_fault(text: str) -> str | None:
    if "\0" in text:
        return "has a null character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair"
    return None


def _no_value(node: yaml.Node) -> str:
    return f"a configuration has no values of the type !!{node.tag.removeprefix(_YAML_TAG)}"


def _scalar(node: yaml.ScalarNode) -> object:
    value: object = yaml.constructor.SafeConstructor().construct_object(node)
    return value
