"""How a model takes system turns: chat templates of open models know no `developer`, and some refuse `system` too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.config import SystemRole

    Messages = list[dict[str, Any]]

_INSTRUCTING = ("system", "developer")


def for_model(messages: Messages, rule: SystemRole) -> Messages:
    """`messages` as a model with this rule takes them; turns that need no change are the client's own objects.

    `native` changes nothing, `system` renames developer turns, `user` merges all instructing turns into the first user
    turn.
    """
    if rule == "native":
        return messages
    if rule == "system":
        return [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in messages]
    return _merged(messages)


def _merged(messages: Messages) -> Messages:
    instructions = [turn for turn in messages if turn["role"] in _INSTRUCTING]
    if not instructions:
        return messages
    others = [turn for turn in messages if turn["role"] not in _INSTRUCTING]
    # Without a user turn the instructions become one, where the first of them stood: before all that is left.
    first = next((index for index, turn in enumerate(others) if turn["role"] == "user"), None)
    if first is None:
        first, others = 0, [{"role": "user", "content": ""}, *others]
    user = others[first]
    content = _joined([turn.get("content") for turn in (*instructions, user)])
    return [*others[:first], {**user, "content": content}, *others[first + 1 :]]


def _joined(contents: list[Any]) -> str | list[dict[str, Any]]:
    """One content of several: texts with a blank line between them, other parts in their order after the text before.

    Text parts that meet where two contents meet become one part; a list of parts stays one.
    """
    parts: list[dict[str, Any]] = []
    # The texts of the last part so far; joined once, or many short turns would take the square of their time.
    meeting: list[str] = []
    for content in contents:
        for index, part in enumerate(_parts(content)):
            is_text = part["type"] == "text"
            if index == 0 and is_text and meeting:
                parts.pop()
            else:
                _close(parts, meeting)
            parts.append(part)
            if is_text:
                meeting.append(part["text"])
    _close(parts, meeting)
    if any(isinstance(content, list) for content in contents):
        return parts or ""
    return parts[0]["text"] if parts else ""


def _close(parts: list[dict[str, Any]], meeting: list[str]) -> None:
    """Give the last part the texts that met in it."""
    if len(meeting) > 1:
        parts[-1] = {**parts[-1], "text": "\n\n".join(meeting)}
    meeting.clear()


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
