from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from engines.models import CATALOGUE, prepare
from engines.models.convert import SHARED_FILES
from engines.models.loading import load
from engines.models.safetensors_file import read

if TYPE_CHECKING:
    from pathlib import Path

TINY = ("tiny-llama", "tiny-qwen3")


def test_smollm2_names_the_capital_of_france(smollm2: Path) -> None:
    loaded = load(smollm2)
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert loaded.tokenizer.decode(output[0]).endswith("assistant\nThe capital of France is Paris.<|im_end|>")


def test_smollm2_config_names_no_quantization_and_ties_embeddings(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"] is True
    assert not any("lm_head" in tensor.name for tensor in read(smollm2 / "model.safetensors"))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a 1234", ["a", "Ġ", "1", "2", "3", "4"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
        ("don't", ["don", "'t"]),
    ],
    ids=["digits-alone", "special-token", "contraction"],
)
def test_tokenizer_splits_as_smollm2_does(root: Path, text: str, pieces: list[str]) -> None:
    tokenizer = load(prepare("tiny-llama", root)).tokenizer
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_all_models_share_one_vocabulary_byte_for_byte(root: Path, smollm2: Path, name: str) -> None:
    folder = prepare(name, root)
    for file_name in SHARED_FILES:
        assert (folder / file_name).read_bytes() == (smollm2 / file_name).read_bytes()


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_catalogue_counts_are_those_of_the_weights(root: Path, name: str) -> None:
    folder, entry = prepare(name, root), CATALOGUE[name]
    tensors = read(folder / "model.safetensors")
    assert sum(tensor.elements for tensor in tensors) == entry.parameters
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == entry.layers


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_loads_every_weight_and_generates(root: Path, name: str) -> None:
    folder = prepare(name, root)
    loaded = load(folder)
    state = loaded.model.state_dict()
    names = {tensor.name for tensor in read(folder / "model.safetensors")}
    assert names | {"lm_head.weight"} == set(state)
    config = loaded.model.config
    assert config.num_attention_heads > config.num_key_value_heads
    assert ("model.layers.0.self_attn.q_norm.weight" in names) == (name == "tiny-qwen3")
    output = loaded.model.generate(torch.tensor([[1, 4093, 198]]), max_new_tokens=4, do_sample=False)
    assert output.shape[1] > 3


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_has_the_same_bytes_when_built_again(root: Path, smollm2: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / smollm2.name).symlink_to(smollm2)
    again, before = prepare(name, tmp_path), prepare(name, root)
    assert (again / "model.safetensors").read_bytes() == (before / "model.safetensors").read_bytes()


def test_tiny_models_differ_in_depth_and_weights(root: Path) -> None:
    llama, qwen = (read(prepare(name, root) / "model.safetensors") for name in TINY)
    assert len(llama) < len(qwen)
    assert llama[0].name == qwen[0].name
    assert llama[0].read() != qwen[0].read()
