"""Perplexity of a model on a text, and on answers in its chat format."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.models.errors import LayerChoiceError
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from engines.models.loading import LoadedModel

WINDOW_TOKENS = 512
STRIDE_TOKENS = 256


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood (natural logarithm) over `tokens` scored tokens."""

    value: float
    tokens: int


def encode(loaded: LoadedModel, text: str, limit: int) -> list[int]:
    """The first `limit` tokens of `text`, without special tokens."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:limit]


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
    total, scored, end = 0.0, 0, 1
    starts = range(0, max(len(ids) - window, 0) + stride, stride)
    for done, begin in enumerate(starts, 1):
        piece = ids[begin : begin + window]
        fresh = min(begin + len(piece) - end, len(piece) - 1)
        if fresh > 0:
            total += _negative_log_likelihood(loaded, piece, fresh)
            scored += fresh
            end = begin + len(piece)
        progress("perplexity", done, len(starts))
    return Perplexity(math.exp(total / scored), scored)


def answer_perplexity(loaded: LoadedModel, dialogues: Sequence[tuple[str, str]]) -> Perplexity:
    """Perplexity of the answers of `dialogues` (question, answer), each asked in the model's chat template."""
    total, scored = 0.0, 0
    for question, answer in dialogues:
        prompt: str = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        answer_ids = encode(loaded, answer, WINDOW_TOKENS)
        total += _negative_log_likelihood(loaded, encode(loaded, prompt, WINDOW_TOKENS) + answer_ids, len(answer_ids))
        scored += len(answer_ids)
    return Perplexity(math.exp(total / scored), scored)


def _negative_log_likelihood(loaded: LoadedModel, ids: Sequence[int], count: int) -> float:
    """Sum over the last `count` tokens of `ids`, in nats."""
    import torch

    with torch.inference_mode():
        batch = torch.tensor([list(ids)])
        # One position more than is scored: position t predicts token t + 1.
        logits = loaded.model(batch, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, batch[0, -count:], reduction="none")
        return float(losses.double().sum())


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
