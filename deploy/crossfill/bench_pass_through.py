"""The least that a router on FastAPI and aiohttp can do, to compare with: it reads no request and passes every byte on.

Run: `python -m crossfill.bench_pass_through PORT MODEL=URL…`. Models take turns.
"""

import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def create_app(urls: dict[str, str]) -> FastAPI:
    """An application before one worker of each model."""
    turns = itertools.cycle(urls.items())
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            sessions.append(session)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        model, url = next(turns)
        headers = {"content-type": "application/json"}
        answer = await sessions[0].post(f"{url}/v1/chat/completions", data=await request.body(), headers=headers)
        return StreamingResponse(
            answer.content.iter_any(), media_type="text/event-stream", headers={"x-crossfill-model": model}
        )

    return app


if __name__ == "__main__":
    port, *models = sys.argv[1:]
    app = create_app(dict(model.split("=", 1) for model in models))
    uvicorn.run(app, port=int(port), loop="uvloop", http="httptools", access_log=False, log_level="warning")
