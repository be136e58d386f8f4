"""Llama, and SmolLM2, which is one."""

from typing import Any

from sglang.srt.models import llama

from engines.mapped_models.attention import MappedAttention, adopt


class LlamaAttention(MappedAttention, llama.LlamaAttention):  # type: ignore[misc]  # SGLang is untyped
    """Nothing lies between projection and rotation."""


class LlamaForCausalLM(llama.LlamaForCausalLM):  # type: ignore[misc]
    """SGLang's, with this attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(self, llama.LlamaAttention, LlamaAttention)


EntryClass = LlamaForCausalLM
