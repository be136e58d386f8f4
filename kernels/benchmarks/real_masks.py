"""Queries, keys, values and block masses of each layer of a real model on a real text: the topics of Python's help."""

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.rows import rows_at


@dataclass(frozen=True)
class Captured:
    """One layer's attention.

    Attributes:
        query: [T, H, d], rotated.
        keys, values: [T, H_kv, d], keys rotated.
        mass: of all rows.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mass: BlockMass


def masks_of(folder: Path, length: int) -> list[Captured]:
    """What each layer of the model in `folder` attends to within the first `length` tokens of the text."""
    from engines.models.loading import import_transformers

    transformers = import_transformers("real masks")

    captured: list[Captured] = []

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **extras: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        out, rows = torch.empty_like(q), rows_at(range(q.shape[0]))
        mass = block_mass(q, k, v, slice(0, q.shape[0]), rows, scale=extras["scaling"], out=out)
        captured.append(Captured(q, k, v, mass))
        return out[None], None

    transformers.AttentionInterface.register("captured", attend)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer(text[: length * 8])["input_ids"][:length]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="captured"
    )
    with torch.inference_mode():
        model.model(torch.tensor([tokens]), use_cache=False)
    return captured
