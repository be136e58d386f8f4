"""Two faults of workers that break clients' stream helpers, mended where the right value is certain.

- A tool-call delta without `index`: the OpenAI SDKs cannot put it together.
- A choice that finishes twice, or that at the end of the stream is the only one left open.

Everything else of a worker's events is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]


class Repair(StrEnum):
    """What was mended, or, for `tool_index_unknown`, could not be."""

    TOOL_INDEX = "tool_index"
    TOOL_INDEX_UNKNOWN = "tool_index_unknown"
    FINISH_TWICE = "finish_twice"
    FINISH_MISSING = "finish_missing"


@dataclass(slots=True)
class _Choice:
    is_finished: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    last_call: int | None = None
    highest_call: int = -1

    def open_call(self, index: int, call_id: object) -> None:
        self.last_call = index
        self.highest_call = max(self.highest_call, index)
        if isinstance(call_id, str):
            self.calls[call_id] = index


class StreamRepair:
    """The choices of one stream. `tell` hears of every repair."""

    def __init__(self, tell: Callable[[Repair], None] = lambda _: None) -> None:
        self._tell = tell
        self._choices: dict[int, _Choice] = {}
        self._head: Json = {}
        self._is_text = False

    def mend(self, event: Json, choices: list[Any]) -> bool:
        """Mend an event in place; whether it changed."""
        changed = False
        for choice in choices:
            if not isinstance(choice, dict) or not isinstance(index := choice.get("index"), int):
                continue
            state = self._choices.get(index)
            if state is None:
                state = self._choices[index] = _Choice()
            delta = choice.get("delta")
            if isinstance(delta, dict):
                if isinstance(calls := delta.get("tool_calls"), list):
                    changed |= self._mend_calls(state, calls)
            elif "text" in choice:
                self._is_text = True
            if choice.get("finish_reason"):
                changed |= self._mend_finish(state, choice)
        if not self._head:
            self._head = {name: event[name] for name in ("id", "object", "created", "model") if name in event}
        return changed

    def closing(self) -> list[Json]:
        """Events that finish the choices left open although another one was finished."""
        open_ones = [index for index, choice in self._choices.items() if not choice.is_finished]
        if not open_ones or len(open_ones) == len(self._choices):
            return []
        nothing: Json = {"text": ""} if self._is_text else {"delta": {}}
        events = []
        for index in sorted(open_ones):
            self._choices[index].is_finished = True
            self._tell(Repair.FINISH_MISSING)
            # The worker ends its stream in good order, which is what "stop" says.
            choice = {"index": index, **nothing, "logprobs": None, "finish_reason": "stop"}
            events.append({**self._head, "choices": [choice]})
        return events

    def _mend_finish(self, state: _Choice, choice: Json) -> bool:
        if not state.is_finished:
            state.is_finished = True
            return False
        choice["finish_reason"] = None
        self._tell(Repair.FINISH_TWICE)
        return True

    def _mend_calls(self, state: _Choice, calls: list[Any]) -> bool:
        changed = False
        for call in calls:
            if not isinstance(call, dict):
                continue
            if isinstance(index := call.get("index"), int):
                state.open_call(index, call.get("id"))
            elif (index := _index_of(state, call, is_alone=len(calls) == 1)) is None:
                self._tell(Repair.TOOL_INDEX_UNKNOWN)
            else:
                call["index"], changed = index, True
                state.open_call(index, call.get("id"))
                self._tell(Repair.TOOL_INDEX)
        return changed


def _index_of(state: _Choice, call: Json, *, is_alone: bool) -> int | None:
    """The index that a delta without one must have, None if that is not certain."""
    known = state.calls.get(call_id) if isinstance(call_id := call.get("id"), str) else None
    if known is not None:
        return known
    function = call.get("function")
    # A call opens with its id or its function's name; what follows brings only more of the arguments.
    if isinstance(call_id, str) or (isinstance(function, dict) and function.get("name")):
        return state.highest_call + 1
    return state.last_call if is_alone else None
