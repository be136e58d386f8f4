"""GET /v1/models: every name that a request may give, together and one by one."""

from fastapi import APIRouter, Response

from router.api.json_response import JsonResponse
from router.errors import JsonObject, ModelNotFoundError
from router.services import Services


def model_routes(services: Services) -> APIRouter:
    """The list of models and each model."""
    routes = APIRouter()
    names = services.decider.models

    def described(name: str) -> JsonObject:
        return {"id": name, "object": "model", "created": services.started_s, "owned_by": "crossfill"}

    @routes.get("/v1/models")
    async def list_models() -> Response:
        return JsonResponse({"object": "list", "data": [described(name) for name in names]})

    # Names may hold slashes.
    @routes.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        if name not in names:
            raise ModelNotFoundError(name, names)
        return JsonResponse(described(name))

    return routes
