"""The shapes of answers, for the OpenAPI document. Workers' answers are relayed as they are and may hold more."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.decision.policy import Reason  # noqa: TC001 - pydantic reads the annotations when the module is loaded
from router.dispatch.reuse_outcome import ReuseMode, ReuseReason  # noqa: TC001 - pydantic reads the annotations when the module is loaded


class Answer(BaseModel):
    """Base of all parts of an answer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Usage(Answer):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class RoutingDecision(Answer):
    """Why a model was chosen, with all that is needed to choose again. Parts that do not apply are left out."""

    model: str
    requested: str
    reason: Reason
    request_id: str
    tau: float | list[float]
    sigma: float
    ladder: list[str] | None = None
    unavailable: list[str] | None = None
    scores: dict[str, float] | None = None
    noise: dict[str, float] | None = None
    scorer: str | None = None
    fallback: str | None = None
    difficulty: float | None = None
    features: dict[str, float] | None = None
    pinned: str | None = None
    cost: dict[str, float] | None = None
    cost_weight: float | None = None
    expected_ttft_s: dict[str, float] | None = None
    ttft_weight: float | None = None


class RowBlocks(Answer):
    """Blocks of 64 rows of a prompt: how many were prefilled with what others left, of how many that were prefilled."""

    guided: int
    prompt: int


class ReuseReport(Answer):
    """What a worker made of state that others left, as far as it said. `reason` is why nothing was reused.

    `prefix_hops` is there if earlier tokens of the prompt stood in the worker's own cache and were approximate: so many
    reuses lie between them and an exact computation.
    """

    mode: ReuseMode
    reason: ReuseReason | None = None
    row_blocks: RowBlocks | None = None
    density: float | None = Field(default=None, ge=0, le=1)
    sender: str | None = None
    prefix_hops: int | None = Field(default=None, ge=1)


class Report(Answer):
    """How an answer came about, for clients that asked for it by `crossfill.report`."""

    model: str
    decision: RoutingDecision
    reuse: ReuseReport
    request_id: str


class ChatMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Answer):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    finish_reason: str | None


class ChatCompletion(Answer):
    """An answer in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage | None = None
    crossfill: Report | None = None


class ChatDelta(Answer):
    """What is new in a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChunkChoice(Answer):
    """News of one choice."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None


class ChatCompletionChunk(Answer):
    """The data of one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(Answer):
    """One continuation of a prompt, or what is new in it."""

    index: int
    text: str
    finish_reason: str | None = None


class Completion(Answer):
    """A text completion: an answer in one piece, and the data of one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    crossfill: Report | None = None


class ModelCard(Answer):
    """A name that a request may give."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Answer):
    """Every name."""

    object: Literal["list"]
    data: list[ModelCard]


class StoreNamespace(Answer):
    """What one namespace of the store holds; `epoch` is how often it was flushed."""

    namespace: str
    tenant: str
    model: str
    revision: str
    epoch: int
    pages: int
    size_bytes: int


class StoreStatistics(Answer):
    """What the store at the URL `store` holds.

    `size_bytes` is what counts towards the budget, flushed pages not reclaimed yet included.
    `quarantined` records were taken away because they were not what they should be, since the store was made.
    """

    store: str
    namespaces: list[StoreNamespace]
    pages: int
    size_bytes: int
    budget_bytes: int
    tenant_bytes: int
    leased_pages: int
    quarantined: int


class StoreFlushed(Answer):
    """What a flush of the store at the URL `store` made invisible; `flushed` repeats what it was told to."""

    store: str
    flushed: dict[str, Any]
    pages: int
    size_bytes: int


class Alive(Answer):
    """The process runs."""

    status: Literal["alive"]


class Readiness(Answer):
    """Whether requests can be served, and the state of every worker."""

    status: Literal["ready", "degraded", "unavailable"]
    draining: bool
    models: dict[str, dict[str, Any]]


class ErrorDetail(Answer):
    """What went wrong; `param` is the path of the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str


class Error(Answer):
    """The OpenAI error object."""

    error: ErrorDetail
