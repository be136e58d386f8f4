"""Random models of a few megabytes: real architectures and a real vocabulary, for tests that need no sense.

Weights are uniform and come from the raw integers of MT19937 (numpy's frozen `RandomState`) by exact arithmetic, so
that the bytes are the same on every machine; a normal distribution would go through the C library's logarithm, which is
not.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from engines.models import safetensors_file
from engines.models.convert import CONFIG_FILE, WEIGHTS_FILE, copy_shared, llama_config, rope, write_json
from engines.models.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from engines.models.catalogue import TinyRecipe
    from engines.models.progress import Progress

# Small enough that logits stay near zero (perplexity about the vocabulary size), and of the same size as what a layer
# adds, so that both the token and its context show in every hidden state.
_RESIDUAL_STD = 0.04


def tiny_folder(recipe: TinyRecipe, tokenizer_from: Path, folder: Path, progress: Progress) -> None:
    """Write the model of `recipe` into `folder` (which exists and is empty), with the tokenizer of `tokenizer_from`.

    Raises:
        MissingDependencyError: numpy is not installed.
    """
    try:
        import numpy  # noqa: F401 - asked here, once, for a readable error
    except ImportError as error:
        raise MissingDependencyError("numpy", "make a model with random weights") from error
    tensors = [
        safetensors_file.bf16_tensor(name, shape, _values(recipe.seed, name, shape))
        for name, shape in sorted(_shapes(recipe).items())
    ]
    safetensors_file.write(folder / WEIGHTS_FILE, tensors, lambda done, total: progress("drawing weights", done, total))
    write_json(folder / CONFIG_FILE, _config(recipe))
    copy_shared(tokenizer_from, folder)


def _shapes(recipe: TinyRecipe) -> dict[str, tuple[int, ...]]:
    hidden, inner = recipe.hidden_size, recipe.intermediate_size
    queries, keys = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (recipe.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(recipe.layers):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "mlp.down_proj": (hidden, inner),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "post_attention_layernorm": (hidden,),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.v_proj": (keys, hidden),
        }
        if recipe.qk_norm:
            parts |= {"self_attn.k_norm": (recipe.head_dim,), "self_attn.q_norm": (recipe.head_dim,)}
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


def _values(seed: int, name: str, shape: Sequence[int]) -> Callable[[], npt.NDArray[np.float32]]:
    def draw() -> npt.NDArray[np.float32]:
        import numpy as np

        if len(shape) == 1:
            return np.ones(shape, dtype=np.float32)
        # Every tensor has a stream of its own, so that adding one changes no other.
        stream = np.random.RandomState((seed * 1_000_003 + zlib.crc32(name.encode())) % 2**32)
        half_width = np.float64(3.0) ** 0.5 * _std(name, shape)
        return ((2.0 * stream.random_sample(tuple(shape)) - 1.0) * half_width).astype(np.float32)

    return draw


def _std(name: str, shape: Sequence[int]) -> float:
    if "embed_tokens" in name:
        return _RESIDUAL_STD
    fan_in: float = shape[1] ** -0.5
    return fan_in * _RESIDUAL_STD if name.endswith(("o_proj.weight", "down_proj.weight")) else fan_in


def _config(recipe: TinyRecipe) -> dict[str, Any]:
    config = llama_config(
        head_dim=recipe.head_dim,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.max_tokens,
        num_attention_heads=recipe.heads,
        num_hidden_layers=recipe.layers,
        num_key_value_heads=recipe.kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=recipe.vocab_size,
        **rope(100000.0),
    )
    if not recipe.qk_norm:
        return config
    # Qwen3 has no `mlp_bias`; its attention is Llama's with a norm on each head's Q and K.
    del config["mlp_bias"]
    return config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
