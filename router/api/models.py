"""GET /v1/models: every name that a request may give, together and one by one."""

from fastapi import APIRouter, Request, Response

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
    async def list_models(request: Request) -> Response:
        services.identity.identify(request.scope)
        return JsonResponse({"object": "list", "data": [described(name) for name in names]})

    # Names may hold slashes.
    @routes.get("/v1/models/{name:path}")
    async def get_model(request: Request, name: str) -> Response:
        services.identity.identify(request.scope)
        if name not in names:
            raise ModelNotFoundError(name, names)
        return JsonResponse(described(name))

    return routes
