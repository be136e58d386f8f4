"""Run by test_projections.py in a process of its own: SGLang's attention modules need its process-wide state.

Prints, for each model, how far our projections are from what SGLang's own forward hands to its attention.
"""

import json
import socket
import sys
from types import SimpleNamespace

import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.models import llama as their_llama
from sglang.srt.models import ministral3 as their_ministral3
from sglang.srt.models import qwen3 as their_qwen3
from sglang.srt.server_args import prepare_server_args
from transformers import LlamaConfig, Qwen3Config

from engines.mapped_models import llama, ministral3, qwen3
from engines.mapped_models.attention import MappedAttention, Projected, skips_queries

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
# Positions go beyond those that it was trained for, from where on queries are scaled.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
MODELS = {
    "llama": (llama.LlamaForCausalLM, their_llama.LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama with biases": (
        llama.LlamaForCausalLM,
        their_llama.LlamaForCausalLM,
        LlamaConfig(**SHAPE, attention_bias=True),
    ),
    "qwen3": (qwen3.Qwen3ForCausalLM, their_qwen3.Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
    "ministral3": (
        ministral3.Ministral3ForCausalLM,
        their_ministral3.Ministral3ForCausalLM,
        LlamaConfig(**SHAPE, rope_parameters=YARN, original_max_position_embeddings=16),
    ),
}


def main() -> None:
    start_sglang()
    found = {}
    for name, (ours, theirs, config) in MODELS.items():
        torch.manual_seed(3)
        model = ours(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        own, plain = model.model.layers[1].self_attn, theirs(config).model.layers[1].self_attn
        plain.load_state_dict(own.state_dict())
        found[name] = {
            "differs": differences(own, plain),
            "skips": skips_queries(model),
            "skips plain": skips_queries(theirs(config)),
            "ours": isinstance(own, MappedAttention),
        }
    sys.stdout.write(json.dumps(found))


def start_sglang() -> None:
    folder = sys.argv[1]
    arguments = ["--model-path", folder, "--device", "cpu", "--attention-backend", "torch_native"]
    runtime_context.publish(prepare_server_args(arguments), role="test", ranks=runtime_context.SpawnRanks(world_rank=0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    init_distributed_environment(1, 0, distributed_init_method=address, local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")


class Recorder(torch.nn.Module):
    """In the place of RadixAttention: keeps what it is given."""

    def forward(self, queries, keys, values, *_args, **_more):
        self.given = [queries, keys, values]
        return queries


# All that a forward asks of a batch.
EXTEND = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True, is_decode=lambda: False))


@torch.no_grad()
def differences(own, plain) -> dict[str, float]:
    positions, hidden = torch.arange(25, 55), torch.randn(30, SHAPE["hidden_size"])
    plain.attn = Recorder()
    plain(positions=positions, hidden_states=hidden, forward_batch=EXTEND)
    wanted = [one.reshape(30, -1, SHAPE["head_dim"]) for one in plain.attn.given]
    projection = Projected(own, positions, hidden)
    rows = slice(7, 25)
    parts = {"queries": projection.queries(rows), "keys": projection.keys(rows), "values": projection.values(rows)}
    found = {name: apart(one, of[rows]) for (name, one), of in zip(parts.items(), wanted, strict=True)}
    whole = projection.whole(rows)
    found["whole"] = max(apart(one, of[rows]) for one, of in zip(whole, wanted, strict=True))
    # Two controls: rows of other positions, and queries of which nothing is done but to rotate them.
    found["elsewhere"] = apart(projection.queries(slice(8, 26)), wanted[0][rows])
    own.shape_queries = lambda queries, _: queries
    found["unshaped"] = apart(projection.queries(rows), wanted[0][rows])
    return found


def apart(one, other) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


if __name__ == "__main__":
    main()
