"""Greedy answers of a loaded model in its chat format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.loading import LoadedModel

# One pass over the weights serves a whole batch. Of SmolLM2, eight prompts of 1,000 tokens keep 370 MB of keys and
# values.
BATCH_PROMPTS = 8


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of `text` as it stands: special tokens where it names them, none added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def chat_prompt(tokenizer: Any, message: str) -> str:
    """`message` as the only turn of a chat with the template's default system prompt, up to the assistant's turn."""
    prompt: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
    )
    return prompt


def greedy(
    loaded: LoadedModel,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    stage: str = "answering",
    batch: int = BATCH_PROMPTS,
    progress: Progress = silent,
) -> tuple[str, ...]:
    """The greedy answer to each of `prompts`, `batch` of them at a time, on one line and without special tokens.

    Each prompt is independent of the others in its batch, but for the order in which floats are added.
    """
    answers: list[str] = []
    progress(stage, 0, len(prompts))
    for begin in range(0, len(prompts), batch):
        answers += _together(loaded, prompts[begin : begin + batch], max_new_tokens)
        progress(stage, len(answers), len(prompts))
    return tuple(answers)


def _together(loaded: LoadedModel, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
    import torch

    tokenizer = loaded.tokenizer
    rows = [token_ids(tokenizer, prompt) for prompt in prompts]
    width = max(map(len, rows))
    # Padding stands on the left, so that every answer begins in the same column; the mask also sets the positions.
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    output = loaded.model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=padding
    )
    return [" ".join(tokenizer.decode(row, skip_special_tokens=True).split()) for row in output[:, width:]]
