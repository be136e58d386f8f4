"""GET /openapi.json: what this router offers. No page shows it, because that would load scripts from elsewhere."""

from importlib.metadata import version

import orjson
from fastapi import APIRouter, Response

from router.api.openapi_document import openapi_document
from router.services import Services


def openapi_routes(services: Services) -> APIRouter:
    """The document, written once."""
    routes = APIRouter()
    document = orjson.dumps(openapi_document(services.decider.models, version("crossfill")))

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    return routes
