"""Every error that reaches a client leaves as the OpenAI error object."""

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from router.api.json_response import JsonResponse
from router.errors import AnsweredError, ClientError, error_object
from router.telemetry.record import outcome_of, record_of

_LONGEST_PATH = 200
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def add_error_handlers(app: FastAPI) -> None:
    """Register the handlers on `app`."""
    app.add_exception_handler(AnsweredError, _answered)
    app.add_exception_handler(HTTPException, _http)


async def _answered(request: Request, error: Exception) -> Response:
    assert isinstance(error, AnsweredError), "registered for this class"
    return _respond(request, error)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this class"
    path = request.url.path[:_LONGEST_PATH]
    told = ClientError(
        f"{error.detail}: {request.method} {path}", code=_HTTP_CODES.get(error.status_code), headers=error.headers
    )
    told.status = error.status_code
    return _respond(request, told)


def _respond(request: Request, error: AnsweredError) -> Response:
    record = record_of(request.scope)
    record.error_code = error.code
    record.outcome = outcome_of(error)
    return JsonResponse(error_object(error, record.request_id), status_code=error.status, headers=error.headers)
