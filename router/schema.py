"""What the router checks of a chat request: the types of OpenAI's well-known fields. Other fields pass unseen."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, ValidationError
from typing_extensions import TypeAliasType

from router.errors import InvalidRequestError, JsonObject
from router.yaml_file import data_path

# Fields with which a router steers SGLang's scheduling, transfers and sessions, and fields that can take a worker down
# or slow it for everyone. From a client they would reach into other requests' state; they are refused and not dropped,
# so that nobody believes they had an effect.
_ROUTERS_OWN = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
    *("data_parallel_rank", "routed_dp_rank", "priority"),
    *("session_id", "session_params", "custom_logit_processor"),
    *("input_ids", "stop_regex", "return_hidden_states", "return_routed_experts", "watermark", "mm_processor_kwargs"),
)


class _Strict(BaseModel):
    # Unknown fields are ignored here only: the router forwards the client's own object, not this one.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _OtherPart(_Strict):
    type: str


def _part_kind(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    return "text" if part.get("type") == "text" else "other"


def _content_kind(content: Any) -> str | None:
    if content is None:
        return "none"
    if isinstance(content, str):
        return "str"
    return "parts" if isinstance(content, list) else None


def _stop_kind(stop: Any) -> str | None:
    if stop is None:
        return "none"
    if isinstance(stop, str):
        return "str"
    return "list" if isinstance(stop, list) else None


_Part = Annotated[
    Annotated[_TextPart, Tag("text")] | Annotated[_OtherPart, Tag("other")],
    Discriminator(_part_kind, custom_error_type="part", custom_error_message="must be an object with a `type`"),
]
# Without FailFast a body of a million wrong entries would collect a million errors. The metadata is not hashable, which
# members of a union must be, hence the aliases.
_Parts = TypeAliasType("_Parts", Annotated[list[_Part], Field(min_length=1), FailFast()])
_Strings = TypeAliasType("_Strings", Annotated[list[str], FailFast()])
_Objects = TypeAliasType("_Objects", Annotated[list[dict[str, Any]], FailFast()])

_Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[_Parts, Tag("parts")] | Annotated[None, Tag("none")],
    Discriminator(
        _content_kind,
        custom_error_type="content",
        custom_error_message="must be a string, null or a non-empty list of parts",
    ),
]
_Stop = Annotated[
    Annotated[str, Tag("str")] | Annotated[_Strings, Tag("list")] | Annotated[None, Tag("none")],
    Discriminator(
        _stop_kind, custom_error_type="stop", custom_error_message="must be a string, null or a list of strings"
    ),
]


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: _Content = None
    name: str | None = None
    tool_calls: _Objects | None = None
    tool_call_id: str | None = None


class _ChatBody(_Strict):
    model: str = Field(min_length=1)
    messages: Annotated[list[_Message], Field(min_length=1), FailFast()]
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    # A worker may fail as a whole, and not only this request, on a value out of range.
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: _Stop = None
    seed: int | None = None
    tools: _Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    logit_bias: dict[str, float] | None = None
    user: str | None = None


def check_chat_body(body: JsonObject, choices_limit: int) -> None:
    """Raise InvalidRequestError, `param` being the path of the field, at the first thing without OpenAI's shape."""
    try:
        checked = _ChatBody.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, data_path(body, first["loc"])))
        raise InvalidRequestError(_sentence(param, first["type"], first["msg"]), param=param) from None
    if checked.n is not None and checked.n > choices_limit:
        raise InvalidRequestError(f"`n` must be at most {choices_limit} (limits.choices).", param="n")
    for name in _ROUTERS_OWN:
        if body.get(name) is not None:
            raise InvalidRequestError(f"`{name}` is not a client's to set.", param=name)
    if body.get("stream_options") is not None and not body.get("stream"):
        raise InvalidRequestError("`stream_options` is only allowed with `stream: true`.", param="stream_options")


def _sentence(param: str, kind: str, message: str) -> str:
    match kind:
        case "missing":
            return f"`{param}` is required."
        case "too_short" | "string_too_short":
            return f"`{param}` must not be empty."
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"`{param}` must be an object."
    return f"`{param}` {message.replace('Input should be', 'must be')}."
