"""Notices at once when a client leaves, whatever the router is waiting for."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from router.errors import ClientGoneError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive

    from router.lifecycle import Lifecycle


@asynccontextmanager
async def while_client_listens(receive: Receive, lifecycle: Lifecycle) -> AsyncIterator[None]:
    """Cancel the body of the context when the client disconnects, and raise ClientGoneError from it.

    The end of the router's grace period cancels it too, and raises ShuttingDownError if the body has not caught that.
    The request body must have been read: any message that is not a disconnect is dropped.
    """
    owner = asyncio.current_task()
    assert owner is not None, "runs in a task, as every request does"
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        owner.cancel()

    watcher = asyncio.create_task(watch())
    lifecycle.exchanges.add(owner)
    try:
        yield
    except asyncio.CancelledError as error:
        # A cancellation by somebody else, the server above all, goes on as it is.
        if gone and owner.uncancel() == 0:
            raise ClientGoneError("the client left before the end of its answer") from error
        if not gone and lifecycle.is_over and owner.uncancel() == 0:
            raise ShuttingDownError from error
        raise
    finally:
        lifecycle.exchanges.discard(owner)
        watcher.cancel()
