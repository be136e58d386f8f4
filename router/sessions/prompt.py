"""The whole prompt of a request as chained digests: they tell what two requests share from the start, and hold no text.

The prompt is written as one byte string, in the order in which chat templates use it: tools, then each message, framed.
So the string of a later turn begins with the conversation of the turn before. Two requests share their first n blocks
iff the n-th digests are equal, because a digest covers the namespace and all blocks before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

# About 64 tokens. Half of it would double the cost of each request and of the mirror; twice as much would lose half a
# block, some 60 tokens, at the end of every match.
BLOCK_BYTES = 256

# Of English text in JSON; dense scripts take 3 bytes a character and about two thirds of a token for each.
_BYTES_PER_TOKEN = 4

# 1 MiB, about 260 000 tokens: what lies behind is not compared. Bounds the work for one request to some 5 ms.
_MOST_BLOCKS = 4096

# Conversations are recognised by their latest turns; an edit further back than this is a new one.
_MOST_TURNS = 32

# Longer parts that are no text, images inline above all, stand for themselves by a digest: bytes of a picture are not
# tokens.
_LONGEST_PART_BYTES = 256

_DIGEST_BYTES = 8
_HEAD_FIELDS = ("tools", "documents", "chat_template_kwargs", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Digests of a prompt; `size_bytes` is its length in canonical form, as far as it is compared.

    `blocks` has a digest for each whole block, covering all before it; the rest behind the last one never matches.
    `turn` covers the conversation up to its last user turn, `earlier` up to each user turn that was answered, latest
    first. `session` stands for the client's own name of the conversation.
    """

    blocks: tuple[bytes, ...] = ()
    size_bytes: int = 0
    turn: bytes | None = None
    earlier: tuple[bytes, ...] = ()
    session: bytes | None = None

    def tokens_behind(self, blocks: int) -> float:
        """Estimated tokens of the prompt without its first `blocks` blocks."""
        return max(0, self.size_bytes - blocks * BLOCK_BYTES) / _BYTES_PER_TOKEN


def read_prompt(
    payload: Mapping[str, Any], namespace: bytes, session: str | None = None, *, is_chat: bool = True
) -> Prompt:
    """The prompt of a checked request body; prompts of two namespaces share nothing.

    A chat has `messages`. A text completion has `prompt`, which has blocks and no turns.
    """
    root = blake2b(namespace, digest_size=_DIGEST_BYTES, person=b"crossfill-prompt").digest()
    if is_chat:
        text, ends, is_answered = _conversation(payload)
    else:
        text, ends, is_answered = orjson.dumps(payload["prompt"]), [], False
    text = text[: _MOST_BLOCKS * BLOCK_BYTES]
    blocks = _chain(root, text)
    turns = [_turn(root, blocks, text, end) for end in ends[-_MOST_TURNS:]]
    return Prompt(
        blocks=blocks,
        size_bytes=len(text),
        turn=turns[-1] if turns else None,
        earlier=tuple(reversed(turns if is_answered else turns[:-1])),
        session=_named(root, session) if session else None,
    )


def _conversation(payload: Mapping[str, Any]) -> tuple[bytes, list[int], bool]:
    """The canonical text, the ends of user turns in it, and whether something follows the last of them."""
    # Without `tool_choice` the tools are part of the prompt; SGLang leaves them out for "none".
    hidden = ("tools",) if payload.get("tool_choice") == "none" else ()
    head = {name: payload[name] for name in _HEAD_FIELDS if payload.get(name) is not None and name not in hidden}
    frames = [orjson.dumps(head, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)]
    size, limit = len(frames[0]), _MOST_BLOCKS * BLOCK_BYTES
    messages = payload["messages"]
    last = len(messages) - 1
    ends: list[int] = []
    is_answered = False
    for index, message in enumerate(messages):
        frame = _frame(message)
        size += len(frame)
        frames.append(frame)
        is_answered = True
        if size > limit:
            break
        if message["role"] == "user" and (index == last or messages[index + 1]["role"] != "user"):
            ends.append(size)
            is_answered = False
    return b"".join(frames), ends, is_answered


def _frame(message: Mapping[str, Any]) -> bytes:
    """One message on one line: JSON has no bare newline, so messages cannot run into each other.

    The role comes first, since what is said by another role is another prompt. Null is the same as absent.
    """
    kept = {name: value for name, value in message.items() if value is not None}
    if isinstance(kept.get("content"), list):
        kept["content"] = [_part(part) for part in kept["content"]]
    return b'"%b"' % message["role"].encode() + orjson.dumps(
        kept, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    )


def _part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] == "text":
        return part
    text = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
    if len(text) <= _LONGEST_PART_BYTES:
        return part
    return {"type": part["type"], "digest": blake2b(text, digest_size=16).hexdigest()}


def _chain(root: bytes, text: bytes) -> tuple[bytes, ...]:
    digest, digests = root, []
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest = blake2b(digest + text[start : start + BLOCK_BYTES], digest_size=_DIGEST_BYTES).digest()
        digests.append(digest)
    return tuple(digests)


def _turn(root: bytes, blocks: tuple[bytes, ...], text: bytes, end: int) -> bytes:
    whole = end // BLOCK_BYTES
    before = blocks[whole - 1] if whole else root
    rest = text[whole * BLOCK_BYTES : end]
    return blake2b(before + rest, digest_size=_DIGEST_BYTES, person=b"crossfill-turn").digest()


def _named(root: bytes, session: str) -> bytes:
    return blake2b(root + session.encode(), digest_size=_DIGEST_BYTES, person=b"crossfill-sess").digest()
