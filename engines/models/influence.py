"""How much each layer changes the hidden state (block influence; ShortGPT, Men et al. 2024, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.models.perplexity import WINDOW_TOKENS
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.loading import LoadedModel


def block_influence(
    loaded: LoadedModel, ids: Sequence[int], *, window: int = WINDOW_TOKENS, progress: Progress = silent
) -> tuple[float, ...]:
    """1 minus the mean cosine similarity of each layer's input and output, over the positions of token `ids`.

    The tokens run in independent windows of `window`. Zero: the layer does nothing; near zero: a candidate for
    dropping.

    Raises:
        ValueError: `ids` is empty.
    """
    if not ids:
        raise ValueError("block influence needs at least one token")
    import torch

    similarity = [0.0] * len(loaded.layers)
    hooks = [
        layer.register_forward_hook(_adder(similarity, index), with_kwargs=True)
        for index, layer in enumerate(loaded.layers)
    ]
    starts = range(0, len(ids), window)
    try:
        with torch.inference_mode():
            for done, begin in enumerate(starts, 1):
                loaded.model.model(torch.tensor([list(ids[begin : begin + window])]), use_cache=False)
                progress("block influence", done, len(starts))
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(1.0 - total / len(ids) for total in similarity)


def _adder(similarity: list[float], index: int) -> Any:
    import torch

    def add(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = (args[0] if args else kwargs["hidden_states"]).double()
        after = output.double()
        similarity[index] += float(torch.nn.functional.cosine_similarity(before, after, dim=-1).sum())

    return add
