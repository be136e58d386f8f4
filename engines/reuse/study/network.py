"""A transformers model whose attention is computed by whoever studies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import rows_at
from engines.models.loading import import_transformers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.loading import LoadedModel

_NAME = "crossfill_study"


class Attend(Protocol):
    """Attention of one layer of one text, all rows of it."""

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention [T, H, d] of rotated queries [T, H, d] over keys and values [T, H_kv, d]."""
        ...


def dense(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Every row attends to all rows before it; rows are those of the last keys."""
    count, total, out = query.shape[0], keys.shape[0], torch.empty_like(query)
    rows = rows_at(range(total - count, total))
    paged_attention(query, keys, values, slice(0, total), rows, scale=scale, out=out)
    return out


class Network:
    """A loaded model, whose attention changes from call to call. Not for several threads."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self._model = loaded.model
        # It is studied, never trained: gradients pass through it and stay nowhere.
        self._model.requires_grad_(False)
        self._attend: Attend = dense
        import_transformers("study a pair").AttentionInterface.register(_NAME, _call)
        self._model.set_attn_implementation(_NAME)
        for layer in loaded.layers:
            layer.self_attn.crossfill_network = self

    @property
    def layers(self) -> int:
        """How many it has."""
        count: int = self._model.config.num_hidden_layers
        return count

    @property
    def heads(self) -> int:
        """Of its queries."""
        count: int = self._model.config.num_attention_heads
        return count

    @property
    def kv_numbers(self) -> int:
        """Numbers in the keys and values of one token in one layer."""
        config = self._model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_key_value_heads * dim)

    def hidden(self, tokens: Sequence[int], attend: Attend, *, grad: bool = False) -> torch.Tensor:
        """Last hidden states [T, D] of a text; with `grad`, gradients pass from them into what `attend` computes."""
        self._attend = attend
        with torch.inference_mode(not grad):
            found: torch.Tensor = self._model.model(torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]
        return found

    def answers(
        self, prefix: Sequence[int], attend: Attend, rests: Sequence[Sequence[int]], most: int
    ) -> list[list[int]]:
        """Greedy answers to prompts that begin with `prefix`, which is computed once; what follows it is dense.

        Args:
            prefix: token ids, one at the least.
            attend: of the prefix.
            rests: of each prompt what follows the prefix, one token at the least.
            most: tokens of an answer, which ends before a token that ends texts.
        """
        cache = import_transformers("study a pair").DynamicCache(config=self._model.config)
        ends = self._model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        self._forward(prefix, attend, cache)
        found = []
        for rest in rests:
            said: list[int] = []
            new = list(rest)
            while len(said) < most:
                last = self._forward(new, dense, cache)[-1:]
                token = int(self.log_probabilities(last).argmax())
                if token in ends:
                    break
                said.append(token)
                new = [token]
            found.append(said)
            cache.crop(len(prefix))
        return found

    def _forward(self, tokens: Sequence[int], attend: Attend, cache: Any) -> torch.Tensor:
        self._attend = attend
        with torch.inference_mode():
            output = self._model.model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def log_probabilities(self, hidden: torch.Tensor, *, grad: bool = False) -> torch.Tensor:
        """Of the next token [n, V], from last hidden states [n, D]; with `grad`, gradients pass."""
        with torch.inference_mode(not grad):
            logits: torch.Tensor = self._model.lm_head(hidden)
            return logits.float().log_softmax(dim=-1)

    def compute(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention as the current call wants it, of [1, H, T, d]; returns [1, T, H, d]."""
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        return self._attend(layer, q, k, v, scale)[None]


def _call(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **extras: Any
) -> tuple[torch.Tensor, None]:
    network: Network = module.crossfill_network
    return network.compute(module.layer_idx, query, key, value, extras["scaling"]), None
