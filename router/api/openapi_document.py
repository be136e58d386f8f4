"""The OpenAPI document: requests from the models that check them, answers from those of `answer_schema`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from router.api import answer_schema as answers
from router.request.flush import FlushBody
from router.request.ids import ID_PATTERN
from router.request.options import NAME as OPTIONS
from router.request.options import Reuse
from router.request.schema import ROUTERS_OWN, ChatBody, CompletionBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel
    from pydantic.json_schema import JsonSchemaMode

Json = dict[str, Any]

_REFERENCES = "#/components/schemas/{model}"
_SHOWN = (
    *(answers.ChatCompletion, answers.ChatCompletionChunk, answers.Completion, answers.RoutingDecision),
    *(answers.ModelList, answers.ModelCard, answers.Alive, answers.Readiness, answers.Error),
    *(answers.StoreStatistics, answers.StoreFlushed),
)
_DESCRIPTION = (
    "OpenAI's chat and text completions over several models. The model `auto` is routed per request; "
    "`x-crossfill-decision` tells how. Fields that a request schema does not list reach the worker as they are, except "
    f"these, which are refused: {', '.join(ROUTERS_OWN)}."
)
_REFUSALS = {
    "400": "The request is malformed, or the worker refuses it.",
    "401": "The router asks for API keys, and this is none.",
    "404": "No such model.",
    "408": "The body took too long.",
    "409": "Reuse is required; the model cannot reuse, or there was nothing to reuse.",
    "413": "The body is too large.",
    "431": "The headers are too large.",
}
_OPTIONS_SCHEMA: Json = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "reuse": {"enum": [reuse.value for reuse in Reuse], "default": Reuse.ALLOW.value},
        "session": {"type": "string", "pattern": f"^{ID_PATTERN}$"},
        "report": {
            "type": "boolean",
            "default": False,
            "description": "Add to the answer how it came about; see Report. In a stream it is a comment.",
        },
    },
}
_FAILURES = {
    "500": "The router failed.",
    "502": "The worker failed.",
    "503": "No worker can take the request now.",
    "504": "The worker passed a limit.",
}
_ADMIN_REFUSALS = {
    "403": "No admin keys are configured.",
    "500": "The router failed.",
    "503": "The store did not do what was asked; the message says why.",
}
_HEADERS = {
    "x-request-id": "The client's own id if it sent a sane one.",
    "x-crossfill-model": "The model that was chosen.",
    "x-crossfill-reason": "Why.",
    "x-crossfill-decision": "The decision as JSON; see RoutingDecision.",
    "x-crossfill-worker": "The worker that answers.",
    "x-crossfill-reuse": "What the worker made of state that others left, in its own words; see ReuseReport.",
    "x-crossfill-placement": "Why that worker, and how much of the prompt it holds.",
}


def openapi_document(models: Sequence[str], version: str) -> Json:
    """The document of a router that serves `models`."""
    schemas = _schemas(models)
    either = {"anyOf": [_ref(ChatBody), _ref(CompletionBody)]}
    return {
        "openapi": "3.2.0",
        "info": {"title": "Crossfill", "version": version, "description": _DESCRIPTION},
        "paths": {
            "/v1/chat/completions": {
                "post": _generation(
                    "createChatCompletion",
                    "Answer a conversation",
                    ChatBody,
                    answers.ChatCompletion,
                    answers.ChatCompletionChunk,
                )
            },
            "/v1/completions": {
                "post": _generation(
                    "createCompletion", "Continue a prompt", CompletionBody, answers.Completion, answers.Completion
                )
            },
            "/v1/route": {"post": _post("route", "Tell the model that would answer", either, _decision())},
            "/v1/models": {"get": _get("listModels", "Names a request may give", answers.ModelList)},
            "/v1/models/{name}": {"get": _named_model(models)},
            "/admin/store": {"get": _admin("storeStatistics", "What the shared store holds", answers.StoreStatistics)},
            "/admin/store/flush": {
                "post": _admin("flushStore", "Make stored state a miss at once", answers.StoreFlushed, FlushBody)
            },
            "/live": {"get": _get("live", "Whether the process runs", answers.Alive)},
            "/ready": {"get": _get("ready", "Whether requests can be served", answers.Readiness, answers.Readiness)},
            "/metrics": {"get": _metrics()},
            "/openapi.json": {"get": _own()},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearerAuth": {"type": "http", "scheme": "bearer"}},
        },
        # The empty alternative makes a key optional.
        "security": [{}, {"bearerAuth": []}],
    }


def _schemas(models: Sequence[str]) -> dict[str, Any]:
    bodies = (ChatBody, CompletionBody, FlushBody)
    inputs: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in bodies]
    outputs: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "serialization") for model in _SHOWN]
    _, document = models_json_schema([*inputs, *outputs], ref_template=_REFERENCES)
    schemas: dict[str, Any] = document["$defs"]
    for body in (ChatBody, CompletionBody):
        schema = schemas[_name(body)]
        schema["additionalProperties"] = True
        schema["properties"]["model"]["enum"] = list(models)
        schema["properties"][OPTIONS] = {"anyOf": [_OPTIONS_SCHEMA, {"type": "null"}]}
    return schemas


def _name(model: type[BaseModel]) -> str:
    return model.__name__


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": _REFERENCES.format(model=_name(model))}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _errors(described: dict[str, str]) -> Json:
    return {
        status: {"description": description, "content": _json(_ref(answers.Error))}
        for status, description in described.items()
    }


def _post(name: str, summary: str, body: Json, good: Json) -> Json:
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [
            {
                "name": OPTIONS,
                "in": "header",
                "description": "The same as the field of this name, which wins key by key.",
                "content": _json(_OPTIONS_SCHEMA),
            }
        ],
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": good, **_errors(_REFUSALS | _FAILURES)},
    }


def _generation(name: str, summary: str, body: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel]) -> Json:
    headers = {
        header: {"description": described, "schema": {"type": "string"}} for header, described in _HEADERS.items()
    }
    content = {**_json(_ref(whole)), "text/event-stream": {"itemSchema": _event(chunk)}}
    good = {"description": "The answer, as events if `stream` is true.", "headers": headers, "content": content}
    operation = _post(name, summary, _ref(body), good)
    # A worker's own refusals keep their status.
    operation["responses"] |= _errors({"4XX": "The worker refuses the request."})
    return operation


def _event(chunk: type[BaseModel]) -> Json:
    told = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref(answers.Error)]},
        "description": "An Error is the last event, of a stream that broke.",
    }
    done = {"const": "[DONE]", "description": "The last event of a stream that is whole."}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [done, told]}},
    }


def _decision() -> Json:
    return {
        "description": "The decision. Nothing is sent to a worker.",
        "content": _json(_ref(answers.RoutingDecision)),
    }


def _get(name: str, summary: str, good: type[BaseModel], unavailable: type[BaseModel] | None = None) -> Json:
    responses: Json = {"200": {"description": summary, "content": _json(_ref(good))}}
    if unavailable is not None:
        responses["503"] = {"description": "No worker can serve.", "content": _json(_ref(unavailable))}
    return {"operationId": name, "summary": summary, "responses": responses}


def _admin(name: str, summary: str, good: type[BaseModel], body: type[BaseModel] | None = None) -> Json:
    operation = _get(name, summary, good)
    told: tuple[str, ...] = ("401", "431")
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(_ref(body))}
        told = ("400", "401", "408", "413", "431")
    operation["responses"] |= _errors({status: _REFUSALS[status] for status in told} | _ADMIN_REFUSALS)
    # Without the empty alternative of the others.
    operation["security"] = [{"bearerAuth": []}]
    return operation


def _named_model(models: Sequence[str]) -> Json:
    operation = _get("getModel", "One name", answers.ModelCard)
    operation["parameters"] = [
        {
            "name": "name",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1, "examples": list(models)},
        }
    ]
    operation["responses"] |= _errors({status: _REFUSALS[status] for status in ("401", "404")})
    return operation


def _metrics() -> Json:
    text = {"text/plain": {"schema": {"type": "string"}}}
    good = {"description": "The Prometheus series.", "content": text}
    return {"operationId": "metrics", "summary": "Metrics", "responses": {"200": good}}


def _own() -> Json:
    good = {"description": "This document.", "content": _json({"type": "object"})}
    return {"operationId": "openapi", "summary": "This document", "responses": {"200": good}}
