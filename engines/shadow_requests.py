"""Asks for shadow prefills, in the process that talks HTTP: when nobody else wants anything, one after the other.

A shadow is an ordinary request of one token for the same prompt, in a prefix cache of shadows of the same tenant, whose
answer nobody sees. The scheduler compares it with what it kept (`engines.reuse.shadow`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from cache_store.seldom import SeldomLog

if TYPE_CHECKING:
    from collections.abc import Mapping

MARK = "; shadow=yes"
"""At the end of what the scheduler says of a request that is to have a shadow."""

_log = logging.getLogger("crossfill.hooks")

_LOOK_EVERY_S = 0.1
_PATIENCE_S = 120.0
_MOST_WAITING = 16


class ShadowRequests:
    """Those that wait for their turn. All methods run in the event loop."""

    def __init__(self, *, look_every_s: float = _LOOK_EVERY_S, patience_s: float = _PATIENCE_S) -> None:
        self._look_every_s = look_every_s
        self._patience_s = patience_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._failures = SeldomLog(_log, 60.0, time.monotonic)

    def ask(self, manager: Any, adapted: Any, word: Mapping[str, Any]) -> None:
        """Have the prompt of a request prefilled again, when there is time; not if too many wait already.

        Args:
            manager: SGLang's `TokenizerManager`.
            adapted: its request, of one prompt.
            word: what the router said of it.
        """
        if not isinstance(adapted.rid, str) or len(self._tasks) >= _MOST_WAITING:
            return
        task = asyncio.create_task(self._ask(manager, _shadow(adapted, word)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, manager: Any, shadow: Any) -> None:
        until_s = time.monotonic() + self._patience_s
        async with self._turn:
            while manager.rid_to_state:
                if time.monotonic() > until_s:
                    return
                await asyncio.sleep(self._look_every_s)
            try:
                async for _ in manager.generate_request(shadow, None):
                    pass
            except Exception as error:  # noqa: BLE001
                # Of no one's answer; the request that it is a shadow of has long been served.
                self._failures.warn(f"a shadow prefill failed: {error!r}")


def _shadow(adapted: Any, word: Mapping[str, Any]) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    said = {**word, "reuse": "off", "shadow_of": adapted.rid}
    return GenerateReqInput(
        rid=f"shadow-{adapted.rid}",
        text=adapted.text,
        input_ids=adapted.input_ids,
        sampling_params={"max_new_tokens": 1, "temperature": 0.0, "custom_params": {"crossfill": said}},
        extra_key=f"shadow {adapted.extra_key or ''}",
    )
