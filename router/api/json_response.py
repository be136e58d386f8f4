"""JSON answers."""

from typing import Any

import orjson
from fastapi import Response


class JsonResponse(Response):
    """A response that writes its content with orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """`content` as JSON bytes."""
        return orjson.dumps(content)
