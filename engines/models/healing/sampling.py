"""Conversations that a chat model holds with itself: training text from its own distribution, questions included.

After the opening of a user's turn a chat model writes a question, as it would an answer after the opening of an
assistant's (Magpie, Xu et al. 2024, section 2). Every row goes on, turn by turn, until it is full, so no step of the
batch is wasted on rows that have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.models.generation import token_ids
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engines.models.loading import LoadedModel

ROW_TOKENS = 512
BATCH_ROWS = 128
# Sampling at temperature 1 among the most likely few: the tail of 49,152 is mostly noise of a small model.
_TOP_K = 64
_END = "<|im_end|>"


def converse(
    loaded: LoadedModel,
    rows: int,
    *,
    seed: int,
    length: int = ROW_TOKENS,
    progress: Progress = silent,
) -> npt.NDArray[np.uint16]:
    """`rows` conversations of `length` tokens each, the template's system turn first: token ids [rows, length].

    The rows that a seed gives are the same on one machine with one version of torch; elsewhere rounding may lead
    another way.
    """
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(seed)
    batches = []
    for begin in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - begin)
        turns = _Turns(loaded.tokenizer, count)

        def report(done: int, begin: int = begin, count: int = count) -> None:
            progress("sampling conversations", begin * length + done * count, rows * length)

        batches.append(_batch(loaded, turns, length, generator, report))
    return np.concatenate(batches) if batches else np.empty((0, length), np.uint16)


class _Turns:
    """Who speaks in each row, and the tokens between two turns, which the model does not choose."""

    def __init__(self, tokenizer: Any, rows: int) -> None:
        self.rows = rows

        opening: str = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        self.opening = token_ids(tokenizer, opening.rpartition(_END)[0])
        self.end: int = tokenizer.convert_tokens_to_ids(_END)
        self._next = {who: token_ids(tokenizer, f"\n<|im_start|>{who}\n") for who in ("user", "assistant")}
        self._speaker = ["user"] * rows
        self._forced: list[list[int]] = [[] for _ in range(rows)]

    def steer(self, sampled: list[int]) -> list[int]:
        """The tokens to append, one a row: what was sampled, or what the template puts there."""
        chosen = []
        for row, token in enumerate(sampled):
            if self._forced[row]:
                chosen.append(self._forced[row].pop(0))
                continue
            if token == self.end:
                self._speaker[row] = "assistant" if self._speaker[row] == "user" else "user"
                self._forced[row] = list(self._next[self._speaker[row]])
            chosen.append(token)
        return chosen


def _batch(loaded: LoadedModel, turns: _Turns, length: int, generator: Any, report: Any) -> npt.NDArray[np.uint16]:
    import numpy as np
    import torch

    from engines.models.healing import network

    out = torch.empty(turns.rows, length, dtype=torch.long)
    position = len(turns.opening)
    out[:, :position] = torch.tensor(turns.opening)
    new, cache = out[:, :position], network.growing_cache(length)
    with torch.inference_mode(), network.training_attention(loaded.model):
        while position < length:
            logits = loaded.model(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            values, ids = logits.float().topk(_TOP_K)
            picked = torch.multinomial(values.softmax(-1), 1, generator=generator)
            sampled = ids.gather(1, picked)[:, 0].tolist()
            new = torch.tensor(turns.steer(sampled))[:, None]
            out[:, position : position + 1] = new
            position += 1
            report(position)
    return out.numpy().astype(np.uint16)
