"""Perplexity of a model on a text, and on answers in its chat format."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engines.models.errors import LayerChoiceError
from engines.models.generation import chat_prompt, token_ids
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from engines.models.loading import LoadedModel

WINDOW_TOKENS = 512
STRIDE_TOKENS = 256


@dataclass(frozen=True)
class Perplexity:
    """From the negative log-likelihood of each scored token, in nats, in the order of the text."""

    losses: tuple[float, ...] = field(repr=False)

    @property
    def value(self) -> float:
        """The exponential of the mean loss."""
        return math.exp(math.fsum(self.losses) / len(self.losses))

    @property
    def tokens(self) -> int:
        """How many were scored."""
        return len(self.losses)


def encode(loaded: LoadedModel, text: str, limit: int) -> list[int]:
    """The first `limit` tokens of `text`, without special tokens."""
    return token_ids(loaded.tokenizer, text)[:limit]


def perplexity(
    loaded: LoadedModel,
    ids: Sequence[int],
    *,
    window: int = WINDOW_TOKENS,
    stride: int = STRIDE_TOKENS,
    progress: Progress = silent,
) -> Perplexity:
    """Sliding-window perplexity of token `ids`.

    Each window holds at most `window` tokens and begins `stride` after the one before; only tokens that no earlier
    window scored count, so all but the first window's see at least `window - stride` tokens of context. A token without
    any context (the first of all, and each window's first when `stride == window`) is not scored.

    Raises:
        ValueError: fewer than two tokens, or not 0 < stride <= window.
    """
    if len(ids) < 2 or not 0 < stride <= window:
        raise ValueError(f"need two tokens and 0 < stride <= window, got {len(ids)} tokens, {stride=}, {window=}")
    losses: list[float] = []
    end = 1
    starts = range(0, max(len(ids) - window, 0) + stride, stride)
    for done, begin in enumerate(starts, 1):
        piece = ids[begin : begin + window]
        fresh = min(begin + len(piece) - end, len(piece) - 1)
        if fresh > 0:
            losses += _losses(loaded, piece, fresh)
            end = begin + len(piece)
        progress("perplexity", done, len(starts))
    return Perplexity(tuple(losses))


def answer_perplexity(
    loaded: LoadedModel, dialogues: Sequence[tuple[str, str]], *, progress: Progress = silent
) -> Perplexity:
    """Perplexity of the answers of `dialogues` (question, answer), each asked in the model's chat template."""
    losses: list[float] = []
    for done, (question, answer) in enumerate(dialogues, 1):
        answer_ids = encode(loaded, answer, WINDOW_TOKENS)
        prompt_ids = encode(loaded, chat_prompt(loaded.tokenizer, question), WINDOW_TOKENS)
        losses += _losses(loaded, prompt_ids + answer_ids, len(answer_ids))
        progress("chat answers", done, len(dialogues))
    return Perplexity(tuple(losses))


def conversation_perplexity(
    loaded: LoadedModel, conversations: Sequence[Sequence[int]], *, progress: Progress = silent
) -> Perplexity:
    """Perplexity of whole conversations, each the token ids of its chat format: all tokens after the first.

    Raises:
        ValueError: there is none, or one has fewer than two tokens.
    """
    if not conversations or min(map(len, conversations)) < 2:
        raise ValueError("need at least one conversation, and two tokens in each")
    losses: list[float] = []
    for done, ids in enumerate(conversations, 1):
        losses += _losses(loaded, ids, len(ids) - 1)
        progress("conversations", done, len(conversations))
    return Perplexity(tuple(losses))


def _losses(loaded: LoadedModel, ids: Sequence[int], count: int) -> list[float]:
    """Negative log-likelihood of each of the last `count` tokens of `ids`, in nats."""
    import torch

    with torch.inference_mode():
        batch = torch.tensor([list(ids)])
        # One position more than is scored: position t predicts token t + 1.
        logits = loaded.model(batch, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
        losses: list[float] = torch.nn.functional.cross_entropy(logits, batch[0, -count:], reduction="none").tolist()
    return losses


@contextmanager
def without_layers(loaded: LoadedModel, layers: Collection[int]) -> Iterator[LoadedModel]:
    """`loaded` with `layers` (numbered from 0) taken out, in memory; put back on leaving. Not for use from two threads.

    Raises:
        LayerChoiceError: a layer that the model does not have, or no layer would be left.
    """
    from torch.nn import ModuleList

    body, config = loaded.model.model, loaded.model.config
    everything = body.layers
    count = len(everything)
    dropped = set(layers)
    if not dropped <= set(range(count)) or len(dropped) == count:
        raise LayerChoiceError(sorted(dropped), count)
    body.layers = ModuleList(layer for index, layer in enumerate(everything) if index not in dropped)
    _renumber(body.layers, config)
    try:
        yield loaded
    finally:
        body.layers = everything
        _renumber(everything, config)


def _renumber(layers: Any, config: Any) -> None:
    # The KV cache is indexed by each attention's own number and sized by the config.
    config.num_hidden_layers = len(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
