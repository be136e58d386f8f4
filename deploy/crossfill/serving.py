"""What a running router serves, asked over HTTP."""

import asyncio
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from crossfill.errors import ServingError
from router.tenants.key_file import KEY_PATTERN

_LIMIT_S = 10.0

_KEY = re.compile(KEY_PATTERN)


@dataclass(frozen=True)
class ServedWorker:
    """One worker, as the router sees it."""

    model: str
    id: str
    state: str
    in_flight: int


@dataclass(frozen=True)
class Serving:
    """`names` are what a request may give as its model, `status` is ready, degraded or unavailable."""

    status: str
    names: tuple[str, ...]
    workers: tuple[ServedWorker, ...]


def ask_router(url: str, key: str | None) -> Serving:
    """What the router at `url` serves. Raises ServingError, one line, if it cannot be asked."""
    url = url.rstrip("/").removesuffix("/v1")
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ServingError(f"not a URL: {url!r}; write http://HOST:PORT")
    # The key itself is a secret: it is not shown.
    if key and not _KEY.fullmatch(key):
        raise ServingError(
            "the key of --key or CROSSFILL_API_KEY cannot be sent: it must be visible ASCII, at most 512"
        )
    try:
        return asyncio.run(_ask(url, key))
    except aiohttp.ClientConnectorError as error:
        raise ServingError(f"nothing answers at {url}: {error.strerror or error}") from error
    except TimeoutError as error:
        raise ServingError(f"{url} did not answer within {_LIMIT_S:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Whatever else listens there may answer with anything.
        raise ServingError(f"what answers at {url} is not a Crossfill router") from error


async def _ask(url: str, key: str | None) -> Serving:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with asyncio.timeout(_LIMIT_S), aiohttp.ClientSession() as session:
        # It is not ready with status 503, and tells what it has all the same.
        async with session.get(f"{url}/ready") as response:
            ready = await response.json()
        async with session.get(f"{url}/v1/models", headers=headers) as response:
            listed = await response.json()
            if response.status == 401:
                raise ServingError(f"{url}: {listed['error']['message']} Here: --key, or CROSSFILL_API_KEY.")
    return _serving(ready, listed)


def _serving(ready: Any, listed: Any) -> Serving:
    return Serving(
        status=str(ready["status"]),
        names=tuple(str(model["id"]) for model in listed["data"]),
        workers=tuple(
            ServedWorker(model, worker["id"], worker["state"], worker["in_flight"])
            for model, of_model in ready["models"].items()
            for worker in of_model["workers"]
        ),
    )
