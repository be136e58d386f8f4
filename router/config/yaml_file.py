"""Reads a pydantic model from a YAML file; a fault is one line: file, line, key path and, for a typo, the key meant."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import orjson
import yaml
from pydantic import BaseModel, ValidationError

from router.config.text_file import read_bounded
from router.config.yaml_nodes import check_nodes
from router.errors import ConfigError
from router.faults import data_path, placed_at, without_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import ErrorDetails

    from router.faults import KeyPath

Model = TypeVar("Model", bound=BaseModel)

_MOST_BYTES = 2**20


def load_yaml(path: Path | str, model_class: type[Model]) -> Model:
    """Read `path` as `model_class`, types taken strictly (a quoted number is not a number).

    Relative paths in fields that resolve against a validation context get `{"folder": the file's folder}`.
    Raises ConfigError, with a message of one line, for a file that cannot be read, is not YAML or does not fit.
    """
    path = Path(path)
    root, data = _parse(path)
    try:
        return model_class.model_validate_json(orjson.dumps(data), strict=True, context={"folder": path.parent})
    except ValidationError as error:
        raise ConfigError(_explain(path, root, data, model_class, error)) from error


def read_mapping(path: Path) -> dict[Any, Any]:
    """What `path` holds, not yet checked against any model. Raises ConfigError, as `load_yaml` does."""
    return _parse(path)[1]


def _parse(path: Path) -> tuple[yaml.Node | None, dict[Any, Any]]:
    text = read_bounded(path, _MOST_BYTES)
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.reason}") from error
    with _one_line_faults(path, loader):
        root = loader.get_single_node()
        check_nodes(path, root)
        data = None if root is None else loader.construct_document(root)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, found {_kind(data)}")
    return root, data


@contextmanager
def _one_line_faults(path: Path, loader: yaml.SafeLoader) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        told = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{path}:{line}: not valid YAML: {told}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}:{loader.line + 1}: is nested too deep") from error
    except (ValueError, ArithmeticError) as error:
        # What the YAML library lets through of a text, as in `"\\UFFFFFFFF"`.
        raise ConfigError(f"{path}:{loader.line + 1}: not valid YAML: {' '.join(str(error).split())}") from error


def _explain(
    path: Path, root: yaml.Node | None, data: object, model_class: type[BaseModel], error: ValidationError
) -> str:
    details = _causes(error.errors(include_url=False))
    # An unknown key is usually the cause of a missing one.
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    keys = (*data_path(data, first), *placed_at(first))
    where = f"{path}:{line}" if (line := _line(root, keys)) else str(path)
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    # What was given may be a URL in the wrong place, and a message may reach a log.
    return f"{where}: {without_credentials(_sentence(model_class, keys, first, data))}{more}"


def _causes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without the errors that follow from another one deeper down: a list is short because its entry was refused."""
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail, place in zip(details, places, strict=True)
        if not any(len(other) > len(place) and other[: len(place)] == place for other in places)
    ]


def _sentence(model_class: type[BaseModel], keys: KeyPath, detail: ErrorDetails, data: object) -> str:
    dotted = ".".join(map(str, keys))
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {dotted!r}" + _suggestion(model_class, keys)
        case "missing":
            return f"the key {dotted!r} is missing"
        case "value_error" | "assertion_error":
            text = detail["msg"].split(", ", 1)[-1]
            return f"{dotted}: {text}" if dotted else text
        case "union_tag_invalid":
            return f"{dotted}.{_discriminator(detail)} must be one of {detail['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return f"the key '{dotted}.{_discriminator(detail)}' is missing"
    text = detail["msg"].replace("Input should be", "must be")
    # Before it is cut: what is left of a password would not be found.
    shown = without_credentials(repr(_value_at(data, keys)))
    return f"{dotted}: {text}, not {shown if len(shown) <= 80 else shown[:80] + '…'}"


def _discriminator(detail: ErrorDetails) -> str:
    """The key that says which of several sections is meant."""
    return str(detail["ctx"]["discriminator"]).strip("'")


def _suggestion(model_class: type[BaseModel], keys: KeyPath) -> str:
    key = str(keys[-1])
    siblings = [name for model in _models_at(model_class, keys[:-1]) for name in model.model_fields]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {'.'.join(map(str, (*keys[:-1], close[0])))!r}?"
    elsewhere = next((path for path in field_paths(model_class) if path[-1] == key), None)
    if elsewhere is not None:
        return f"; did you mean {'.'.join(elsewhere)!r}?"
    return f"; expected one of: {', '.join(dict.fromkeys(siblings))}"


def _value_at(data: Any, keys: KeyPath) -> object:
    for part in keys:
        data = data[part]
    return data


def _line(root: yaml.Node | None, keys: KeyPath) -> int | None:
    """Line (from 1) of the deepest part of `keys` that the file has."""
    node, line = root, None
    for part in keys:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == part), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _models_at(model_class: type[BaseModel], keys: KeyPath) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = [model_class]
    for part in keys:
        fields = [model.model_fields[part] for model in found if isinstance(part, str) and part in model.model_fields]
        if fields:
            found = [model for field in fields for model in _models_in(field.annotation)]
    return found


def field_paths(model_class: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field of `model_class` and of the models within it, to eight levels."""
    for name, field in model_class.model_fields.items():
        yield (*above, name)
        for model in _models_in(field.annotation):
            if len(above) < 8:
                yield from field_paths(model, (*above, name))


def _kind(data: Any) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"
