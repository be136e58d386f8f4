"""GET /admin/store and POST /admin/store/flush: the shared store, for operators."""

import logging
from functools import partial

import orjson
from fastapi import APIRouter, Request, Response

from cache_store.backends.protocol import BackendStats, Reclaimed
from cache_store.config import StoreSettings
from router.api.json_response import JsonResponse
from router.errors import JsonObject, StoreFailedError
from router.request.body import BodyReader, parse_json_object
from router.request.flush import FlushBody, parse_flush, refuse_repeated
from router.services import Services
from router.telemetry.record import record_of

_log = logging.getLogger("crossfill.admin")

# Of a namespace in an answer.
_ENTRY_BYTES = 256


def admin_routes(services: Services) -> APIRouter:
    """Statistics and flushes."""
    routes = APIRouter()
    limits, offload = services.config.limits, services.offload
    reader = BodyReader(limits, offload)

    def understand(body: bytes) -> FlushBody:
        asked = parse_flush(parse_json_object(body, limits))
        refuse_repeated(body)
        return asked

    @routes.get("/admin/store")
    async def show_store(request: Request) -> Response:
        services.identity.identify_operator(request.scope)
        stats = await services.store.stats()
        # Clients' salts make namespaces, so there may be many.
        write = partial(_written, stats, services.config.store)
        return Response(await offload.run(write, _ENTRY_BYTES * len(stats.scopes)), media_type="application/json")

    @routes.post("/admin/store/flush")
    async def flush_store(request: Request) -> Response:
        operator = services.identity.identify_operator(request.scope)
        asked = await reader.read(request, understand)
        what = orjson.dumps(_chosen(asked)).decode()
        told = f"request {record_of(request.scope).request_id}: {operator} flushes {what}"
        try:
            flushed = await services.store.flush(**asked.filter)
        except StoreFailedError as error:
            _log.warning("%s: %s", told, error)
            raise
        _log.info("%s: %d pages, %d bytes", told, flushed.pages, flushed.size_bytes)
        return JsonResponse(_done(asked, flushed, services.config.store.shown_url))

    return routes


def _written(stats: BackendStats, settings: StoreSettings) -> bytes:
    return orjson.dumps(
        {
            "store": settings.shown_url,
            "namespaces": [
                {
                    "namespace": scope.info.scope.hex(),
                    "tenant": scope.info.tenant,
                    "model": scope.info.model,
                    "revision": scope.info.revision,
                    "epoch": scope.epoch,
                    "pages": scope.pages,
                    "size_bytes": scope.size_bytes,
                }
                for scope in stats.scopes
            ],
            "pages": sum(scope.pages for scope in stats.scopes),
            "size_bytes": stats.size_bytes,
            "budget_bytes": settings.limits.budget_bytes,
            "tenant_bytes": settings.limits.tenant_bytes,
            "leased_pages": stats.leased_pages,
            "quarantined": stats.quarantined,
        }
    )


def _chosen(asked: FlushBody) -> JsonObject:
    return dict(asked.filter) or {"all": True}


def _done(asked: FlushBody, flushed: Reclaimed, store: str) -> JsonObject:
    return {
        "store": store,
        "flushed": _chosen(asked),
        "pages": flushed.pages,
        "size_bytes": flushed.size_bytes,
    }
