"""Which model answered a conversation last: bounded, least recently answered conversations go first."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.sessions.prompt import Prompt


class PinEvent(StrEnum):
    """What an answer did to the pin of its conversation: `kept` is the same model as before, `moved` another one."""

    NEW = "new"
    KEPT = "kept"
    MOVED = "moved"


class Pins:
    """Models by conversation.

    A conversation is the client's own name for it or, without one, the digest of its messages up to a user turn that
    was answered. Digests are rooted in the namespace, so tenants never meet.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._models: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._models)

    def model_of(self, prompt: Prompt) -> str | None:
        """The model that answered the latest known turn. Changes nothing and may be called from any thread."""
        keys = prompt.earlier if prompt.session is None else (prompt.session,)
        return next((model for key in keys if (model := self._models.get(key)) is not None), None)

    def answered(self, prompt: Prompt, model: str) -> PinEvent | None:
        """`model` answered `prompt`: its next turn belongs there. None if the prompt is no conversation."""
        key = prompt.turn if prompt.session is None else prompt.session
        if key is None:
            return None
        before = self.model_of(prompt)
        self._models[key] = model
        self._models.move_to_end(key)
        if len(self._models) > self._remembered:
            self._models.popitem(last=False)
        if before is None:
            return PinEvent.NEW
        return PinEvent.KEPT if before == model else PinEvent.MOVED
