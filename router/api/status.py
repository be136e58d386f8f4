"""GET /live, /ready and /metrics, for the machines that watch the router."""

import asyncio

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from router.api.json_response import JsonResponse
from router.dispatch.workers import Worker, WorkerState
from router.errors import JsonObject
from router.services import Services

_READ = ["GET", "HEAD"]


def status_routes(services: Services) -> APIRouter:
    """Liveness, readiness and metrics."""
    routes = APIRouter()

    @routes.api_route("/live", methods=_READ)
    async def live() -> Response:
        return JsonResponse({"status": "alive"})

    @routes.api_route("/ready", methods=_READ)
    async def ready() -> Response:
        report = readiness(services)
        return JsonResponse(report, status_code=503 if report["status"] == "unavailable" else 200)

    @routes.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        # Thousands of lines take milliseconds, in which streams must go on.
        text = await asyncio.to_thread(generate_latest, services.metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return routes


def readiness(services: Services) -> JsonObject:
    """`ready` if every worker is healthy, `degraded` if some are, `unavailable` if none is or the process stops."""
    return {
        "status": "unavailable" if services.lifecycle.is_draining else _status_of(services.pool.workers),
        "draining": services.lifecycle.is_draining,
        "models": {
            model: {
                "status": _status_of(of_model),
                "workers": [
                    {"id": worker.id, "state": worker.state, "slow": worker.slow, "in_flight": worker.in_flight}
                    for worker in of_model
                ],
            }
            for model, of_model in services.pool.by_model.items()
        },
    }


def _status_of(workers: tuple[Worker, ...]) -> str:
    healthy = sum(worker.state is WorkerState.HEALTHY for worker in workers)
    return "ready" if healthy == len(workers) else "degraded" if healthy else "unavailable"
