"""GGUF to a bfloat16 safetensors folder that transformers and SGLang load, with numpy alone.

Transformers can read GGUF too, but its result depends on its version (tokenizer class, config keys), it loads the model
twice, and it leaves a `quantization_config` behind that makes SGLang look for GGUF weights. Reading the file ourselves
gives bytes that can be pinned.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engines.models import safetensors_file
from engines.models.errors import MissingDependencyError, UnusableFolderError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from engines.models.progress import Progress

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
TOKENIZER_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
SHARED_FILES = (*TOKENIZER_FILES, "generation_config.json")

_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # `tokenizer.ggml.token_type` of a special token


def write_json(path: Path, value: object) -> None:
    """Write `value` with sorted keys and a final newline: the same bytes from every Python."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def gguf_to_folder(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Convert a Llama-architecture GGUF file with tied embeddings into `folder` (which exists and is empty).

    Raises:
        MissingDependencyError: the packages `gguf` or numpy are not installed.
        UnusableFolderError: another architecture, a tensor that Llama does not have, or a vocabulary other than
            byte-level BPE.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError("gguf", "convert a GGUF file") from error
    progress("reading GGUF", 0, None)
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.model"] != "gpt2":
        raise UnusableFolderError(gguf_file, "only Llama models with a byte-level BPE vocabulary can be converted")
    tensors = [_convert_tensor(tensor, fields, gguf_file) for tensor in reader.tensors]
    tensors.sort(key=lambda tensor: tensor.name)
    safetensors_file.write(
        folder / WEIGHTS_FILE, tensors, lambda done, total: progress("converting weights", done, total)
    )
    write_json(folder / CONFIG_FILE, _config(fields))
    _write_tokenizer(folder, fields)


def _convert_tensor(tensor: Any, fields: dict[str, Any], source: Path) -> safetensors_file.Tensor:
    from gguf.quants import dequantize

    # GGUF writes the fastest-running dimension first.
    shape = tuple(int(dim) for dim in reversed(tensor.shape))
    # Llama's converter stores Q and K with rotary pairs interleaved; transformers and SGLang rotate halves.
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    name = _target_name(str(tensor.name), source)
    part = str(tensor.name).split(".")[-2]
    head_count = int(fields[heads[part]]) if part in heads else None

    def values() -> npt.NDArray[np.float32]:
        plain: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        return plain if head_count is None else pairs_to_halves(plain, head_count)

    return safetensors_file.bf16_tensor(name, shape, values)


def _target_name(name: str, source: Path) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    # An `output.weight` would mean untied embeddings, which the config below does not describe.
    raise UnusableFolderError(source, f"unexpected tensor {name!r}")


def pairs_to_halves(weight: npt.NDArray[np.float32], head_count: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of a Q or K projection, [heads * d, hidden], from rotary pairs (2i, 2i+1) to (i, i + d/2)."""
    rows, hidden = weight.shape
    return weight.reshape(head_count, rows // head_count // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def llama_config(**sizes: object) -> dict[str, Any]:
    """A `config.json` of LlamaForCausalLM with SmolLM2's special tokens; `sizes` adds to it or overrides it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "hidden_act": "silu",
        "mlp_bias": False,
        "model_type": "llama",
        "pad_token_id": 2,
        "tie_word_embeddings": True,
        "use_cache": True,
        **sizes,
    }


def rope(theta: float) -> dict[str, Any]:
    """The two spellings of a rotary base: `rope_parameters` (transformers 5) and `rope_theta` (everything before)."""
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}, "rope_theta": theta}


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return llama_config(
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        head_dim=fields["llama.rope.dimension_count"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        max_position_embeddings=fields["llama.context_length"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_hidden_layers=fields["llama.block_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        # GGUF keeps a float32; six digits give back the number that the authors wrote.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        vocab_size=fields["llama.vocab_size"],
        **rope(float(fields["llama.rope.freq_base"])),
    )


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    special = [index for index, kind in enumerate(types) if kind == _CONTROL_TOKEN]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    write_json(folder / "tokenizer.json", _byte_level_bpe(tokens, fields["tokenizer.ggml.merges"], special, flags))
    bos, eos = tokens[fields["tokenizer.ggml.bos_token_id"]], tokens[fields["tokenizer.ggml.eos_token_id"]]
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": bool(fields["tokenizer.ggml.add_bos_token"]),
            "added_tokens_decoder": {str(index): {"content": tokens[index], **flags} for index in special},
            "bos_token": bos,
            "clean_up_tokenization_spaces": False,
            "eos_token": eos,
            "extra_special_tokens": [bos, eos],
            "model_max_length": fields["llama.context_length"],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            # Loads tokenizer.json as it stands; a named class would replace the digit splitting by its own rules.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        },
    )
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
            "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
            # SGLang takes its default temperature from here; without one it samples at 1.0, at which a model of this
            # size seldom makes sense ("capital of France": 6 of 24 sampled answers named Paris).
            "temperature": 0.0,
        },
    )


def _byte_level_bpe(tokens: list[str], merges: list[str], special: list[int], flags: dict[str, bool]) -> dict[str, Any]:
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "type": "ByteLevel", "use_regex": True}
    return {
        "added_tokens": [{"content": tokens[index], "id": index, **flags} for index in special],
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "byte_fallback": False,
            "continuing_subword_prefix": None,
            "dropout": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "ignore_merges": False,
            "merges": [merge.split(" ") for merge in merges],
            "type": "BPE",
            "unk_token": None,
            "vocab": {token: index for index, token in enumerate(tokens)},
        },
        "normalizer": None,
        "padding": None,
        "post_processor": None,
        # `tokenizer.ggml.pre` is "smollm": every digit by itself, then GPT-2's splitting.
        "pre_tokenizer": {
            "pretokenizers": [{"individual_digits": True, "type": "Digits"}, byte_level],
            "type": "Sequence",
        },
        "truncation": None,
        "version": "1.0",
    }


def copy_shared(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation settings, so that two models share one vocabulary byte for byte."""
    for name in SHARED_FILES:
        (folder / name).write_bytes((source / name).read_bytes())
