"""Which model lies in a folder, as digests: two workers share state only if these say that they may."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from engines.errors import ModelIdentityError
from engines.reuse.settings import ModelIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

# Of a file of which nothing is known, and of each tensor.
_SAMPLE_BYTES, _SAMPLES = 2**16, 64
_TENSOR_BYTES, _TENSOR_SAMPLES = 2**11, 2
_MOST_HEADER_BYTES = 2**27
# What turns text into tokens: the first that is there says all.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def read_identity(name: str, folder: Path) -> ModelIdentity:
    """The identity of the model in `folder`, served as `name`.

    Of weights the headers, the sizes and samples of every tensor are digested, not all bytes: reading hundreds of
    gigabytes at every start is out of the question. Training changes a tensor everywhere if it changes it at all; an
    edit of a few numbers by hand may go unseen.

    Raises:
        ModelIdentityError: the folder lacks a file, or its config does not tell the layers.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    except (OSError, ValueError) as error:
        raise ModelIdentityError(f"{name}: {folder} has no usable config.json ({error})") from error
    # Multimodal models keep the language model's settings apart.
    text = config.get("text_config", config)
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        raise ModelIdentityError(f"{name}: {folder}/config.json tells no num_hidden_layers or num_attention_heads")
    if not weights:
        raise ModelIdentityError(f"{name}: {folder} has no weights (*.safetensors, *.bin)")
    return ModelIdentity(
        name=name,
        revision=_digest([folder / "config.json"], sampled=weights),
        tokenizer=_digest(_first(folder, _TOKENIZER_FILES)),
        template=_digest(_first(folder, _TEMPLATE_FILES)),
        layers=layers,
        heads=heads,
    )


def _first(folder: Path, names: Sequence[str]) -> list[Path]:
    return [path for name in names if (path := folder / name).is_file()][:1]


def _digest(whole: Sequence[Path], sampled: Sequence[Path] = ()) -> str:
    digest = hashlib.blake2b(digest_size=16, person=b"crossfill-model")
    for path in whole:
        _frame(digest, path.name.encode(), path.read_bytes())
    for path in sampled:
        size = path.stat().st_size
        _frame(digest, path.name.encode(), size.to_bytes(8, "big"))
        with path.open("rb") as source:
            for start, length in (*_spread(0, size, _SAMPLES, _SAMPLE_BYTES), *_in_tensors(source, size)):
                source.seek(start)
                _frame(digest, source.read(length))
    return digest.hexdigest()


def _spread(begin: int, end: int, count: int, length: int) -> Iterator[tuple[int, int]]:
    """Start and length of `count` samples of [begin, end)."""
    for number in range(count):
        start = begin + number * (end - begin) // count
        yield start, min(length, end - start)


def _in_tensors(source: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Samples of each tensor of a safetensors file, whose header tells where it lies; none if it has no such header."""
    try:
        header_bytes = int.from_bytes(source.read(8), "little")
        if header_bytes > min(size, _MOST_HEADER_BYTES):
            return
        tensors = json.loads(source.read(header_bytes))
        bounds = sorted(tuple(one["data_offsets"]) for name, one in tensors.items() if name != "__metadata__")
        inside = [(8 + header_bytes + int(begin), 8 + header_bytes + int(end)) for begin, end in bounds]
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    yield 8, header_bytes
    for begin, end in inside:
        if 0 <= begin <= end <= size:
            yield from _spread(begin, end, _TENSOR_SAMPLES, _TENSOR_BYTES)


def _frame(digest: hashlib.blake2b, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
