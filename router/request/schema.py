"""What the router checks of a request: the types of OpenAI's well-known fields, and values that end a worker.

Other fields pass unseen. The OpenAPI document describes requests with the same models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from router.errors import InvalidRequestError, JsonObject
from router.faults import data_path

# Fields with which a router steers SGLang's scheduling, transfers and sessions, and fields that can take a worker down
# or slow it for everyone. From a client they would reach into other requests' state; they are refused and not dropped,
# so that nobody believes they had an effect. Reasons: docs/decisions/0005.
ROUTERS_OWN = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
    *("data_parallel_rank", "routed_dp_rank", "priority"),
    *("session_id", "session_params", "custom_logit_processor"),
    *("input_ids", "stop_token_ids", "stop_regex", "return_hidden_states", "return_routed_experts", "watermark"),
    "mm_processor_kwargs",
)

Shape = TypeVar("Shape", bound="GenerationBody")

_LARGEST_INT32 = 2**31 - 1
_MOST_TOP_LOGPROBS = 20


class Checked(BaseModel):
    """Base of all parts of a request. Unknown fields are ignored here only: the router forwards the client's object."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


class TextPart(Checked):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class OtherPart(Checked):
    """A part of any other type, such as `image_url`; it reaches the worker as it is."""

    type: str = Field(json_schema_extra={"not": {"const": "text"}})


def _part_kind(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    return "text" if part.get("type") == "text" else "other"


def _kind(value: Any) -> str | None:
    """The member of a union that `value` is meant to be, so that an error names its path and not every member's."""
    if value is None:
        return "none"
    return next((kind.__name__ for kind in (str, list, dict) if isinstance(value, kind)), None)


def _one_of(message: str) -> Discriminator:
    return Discriminator(_kind, custom_error_type="kind", custom_error_message=message)


_Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OtherPart, Tag("other")],
    Discriminator(_part_kind, custom_error_type="part", custom_error_message="must be an object with a `type`"),
]
# Without FailFast a body of a million wrong entries would collect a million errors. The metadata is not hashable, which
# members of a union must be, hence the aliases.
ContentParts = TypeAliasType("ContentParts", Annotated[list[_Part], Field(min_length=1), FailFast()])
Strings = TypeAliasType("Strings", Annotated[list[str], FailFast()])
Objects = TypeAliasType("Objects", Annotated[list[dict[str, Any]], FailFast()])
_Prompt = Annotated[str, Field(min_length=1)]
Prompts = TypeAliasType("Prompts", Annotated[list[_Prompt], Field(min_length=1), FailFast()])

_Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[ContentParts, Tag("list")] | Annotated[None, Tag("none")],
    _one_of("must be a string, null or a non-empty list of parts"),
]
_Stop = Annotated[
    Annotated[str, Tag("str")] | Annotated[Strings, Tag("list")] | Annotated[None, Tag("none")],
    _one_of("must be a string, null or a list of strings"),
]
_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[dict[str, Any], Tag("dict")]
    | Annotated[None, Tag("none")],
    _one_of("must be 'none', 'auto', 'required' or an object"),
]
_FunctionCall = Annotated[
    Annotated[Literal["none", "auto"], Tag("str")]
    | Annotated[dict[str, Any], Tag("dict")]
    | Annotated[None, Tag("none")],
    _one_of("must be 'none', 'auto' or an object"),
]

# Looked through by `_check_biases`, which stops at the first fault: as a type it would collect a fault for every entry.
_MOST_BIAS = 100
_BIAS = {"type": "number", "minimum": -_MOST_BIAS, "maximum": _MOST_BIAS}
_Biases = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": _BIAS})]


def _refuse_token_ids(prompt: Any) -> Any:
    """SGLang looks ids up without asking whether they exist, and one that does not exist ends it."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (int, list)):
        raise PydanticCustomError("token_ids", "takes text here, not token ids; send the text that they stand for")
    return prompt


_PromptText = Annotated[
    Annotated[_Prompt, Tag("str")] | Annotated[Prompts, Tag("list")],
    _one_of("must be a string or a non-empty list of strings"),
    BeforeValidator(_refuse_token_ids, json_schema_input_type=_Prompt | Prompts),
]


class Message(Checked):
    """One turn of a conversation. Further fields (refusal, audio, annotations, reasoning, …) pass as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: _Content = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None


class StreamOptions(Checked):
    """What a stream tells beside its text."""

    include_usage: bool | None = None


class TemplateArguments(Checked):
    """Arguments of the model's chat template; this one SGLang also reads itself, and dies of another type."""

    spaces_between_special_tokens: bool | None = None


class GenerationBody(Checked):
    """What chat and text completions have in common. A null is the same as a missing field.

    Ranges are those in which a worker is safe: it may fail as a whole, and not only this request, on others.
    """

    model: str = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    stop: _Stop = None
    seed: int | None = None
    logit_bias: _Biases | None = None
    user: str | None = None
    top_k: int | None = Field(default=None, ge=-1, le=_LARGEST_INT32)
    min_tokens: int | None = Field(default=None, ge=0, le=_LARGEST_INT32)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=2)
    # A salt that is not one would be dropped, and its client believe that it has a namespace of its own.
    cache_salt: str | None = None


class ChatBody(GenerationBody):
    """A request for a chat completion. Fields that are not listed reach the worker as they are."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: Objects | None = None
    tool_choice: _ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: Objects | None = None
    function_call: _FunctionCall = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_TOP_LOGPROBS)
    chat_template_kwargs: TemplateArguments | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    modalities: Strings | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class CompletionBody(GenerationBody):
    """A request for text that goes on from a prompt. Fields that are not listed reach the worker as they are."""

    model_config = ConfigDict(title="CompletionRequest")

    prompt: _PromptText
    best_of: int | None = Field(default=None, ge=1)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_TOP_LOGPROBS)
    suffix: str | None = None


def check_chat_body(body: JsonObject, choices_limit: int) -> None:
    """Raise InvalidRequestError, `param` being the path of the field, at the first thing without OpenAI's shape."""
    checked = _validated(ChatBody, body)
    if checked.n is not None and checked.n > choices_limit:
        raise InvalidRequestError(f"`n` must be at most {choices_limit} (limits.choices).", param="n")
    for index, message in enumerate(checked.messages):
        # Others may say nothing: an assistant that calls a tool, a tool without a result.
        if message.role == "user" and message.content is None:
            param = f"messages.{index}.content"
            raise InvalidRequestError(f"`{param}` must be a string or a non-empty list of parts.", param=param)


def check_completion_body(body: JsonObject, choices_limit: int) -> None:
    """The same for a text completion; each prompt has `n` choices of its own."""
    checked = _validated(CompletionBody, body)
    prompts = 1 if isinstance(checked.prompt, str) else len(checked.prompt)
    for name, choices in (("n", checked.n or 1), ("best_of", checked.best_of or 1)):
        if prompts * choices > choices_limit:
            param = "prompt" if choices == 1 else name
            told = f"`{name}` times the number of prompts" if prompts > 1 else f"`{name}`"
            raise InvalidRequestError(f"{told} must be at most {choices_limit} (limits.choices).", param=param)


def _validated(shape: type[Shape], body: JsonObject) -> Shape:
    try:
        checked = shape.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, data_path(body, first)))
        raise InvalidRequestError(sentence(param, first["type"], first["msg"]), param=param) from None
    for name in ROUTERS_OWN:
        if body.get(name) is not None:
            raise InvalidRequestError(f"`{name}` is not a client's to set.", param=name)
    if checked.stream_options is not None and not checked.stream:
        raise InvalidRequestError("`stream_options` is only allowed with `stream: true`.", param="stream_options")
    _check_biases(checked.logit_bias or {})
    return checked


def _check_biases(biases: dict[str, Any]) -> None:
    for token, bias in biases.items():
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not (is_number and -_MOST_BIAS <= bias <= _MOST_BIAS):
            raise InvalidRequestError(
                f"A bias must be a number from {-_MOST_BIAS} to {_MOST_BIAS}.", param=f"logit_bias.{token}"
            )


def sentence(param: str, kind: str, message: str) -> str:
    """A fault of pydantic's in a field, as a client is told of it."""
    match kind:
        case "missing":
            return f"`{param}` is required."
        case "too_short" | "string_too_short":
            return f"`{param}` must not be empty."
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"`{param}` must be an object."
    return f"`{param}` {message.replace('Input should be', 'must be')}."
