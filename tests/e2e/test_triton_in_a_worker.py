"""Two workers whose reuse runs on the Triton kernels, as Triton's interpreter runs them: sender and receiver.

The receivers' run beside one of SGLang's own attention backends, as on a GPU. A third one is plain SGLang.
"""

import json
import os
import re
import time

import httpx
import pytest

from tests.conftest import TWIN_PAIR

from .test_guided_reuse import differences, generate, leave, prompt_of

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def interpreted(start_module_stack, tmp_path_factory):
    tiny = {"sender": "tiny-llama", "receiver": "tiny-qwen3", "layers": [0, 0, 1, 1, 2, 3], "first_layer": 3}
    return start_module_stack(
        {
            "listen": {"port": 0},
            "first_worker_port": 31200,
            "store": {"url": f"lmdb://{tmp_path_factory.mktemp('store')}"},
            "worker": {"max_total_tokens": 4096, "interpret_triton": True},
            "models": [
                {"name": "tiny-llama", "source": "tiny-llama"},
                {"name": "tiny-qwen3", "source": "tiny-qwen3", "worker": {"attention_backend": "torch_native"}},
                {"name": "tiny-twin", "source": "tiny-llama", "worker": {"attention_backend": "torch_native"}},
                {"name": "plain", "source": "tiny-qwen3", "worker": {"attention_backend": "torch_native"}},
            ],
            "reuse": {
                "pairs": [
                    {**tiny, "top_p": 0.7, "min_tokens": 64, "max_density": 1.0},
                    TWIN_PAIR,
                ],
                "maps": {"pool": f"triton-{os.getpid()}", "pool_bytes": 2**24, "dtype": "float32"},
                "wait_s": 10.0,
                "wait_share": 1e6,
            },
        }
    )


def triton_calls(stack, url, op):
    return stack.counter(url, "crossfill_kernel_calls_total", op=op, implementation="triton")


def test_masses_and_guided_attention_come_from_triton(interpreted):
    prompt = prompt_of(150, seed=9)
    sender, receiver = (interpreted.workers[name][0] for name in ("tiny-llama", "tiny-qwen3"))
    left = leave(interpreted, "tiny-llama", prompt, "acme", new_tokens=2)
    # Of the sender's layers 1 and 2, which guide the receiver's layers 3 and 4, and layer 0, which the twin maps.
    assert triton_calls(interpreted, sender, "block_mass") == 3
    guided = generate(receiver, prompt, "acme", new_tokens=2)
    assert triton_calls(interpreted, receiver, "guided_attention") == 2
    # What is not reused is SGLang's: the last row block of the two guided layers is all that we computed densely.
    assert interpreted.counter(receiver, "crossfill_kernel_calls_total", op="paged_attention") == 2
    assert interpreted.counter(receiver, "crossfill_reuse_row_blocks_total", outcome="guided") == 2
    # Two whole row blocks of 128 rows: the first block and the diagonal are all they have, so nothing is left out.
    dense = generate(receiver, prompt, "acme", reuse="off", new_tokens=2)
    assert max(differences(guided, dense)) < 1e-4
    again = generate(sender, prompt, "bolt", reuse="off", new_tokens=2)
    assert max(differences(left, again)) < 1e-4
    assert triton_calls(interpreted, sender, "block_mass") == 6


def test_map_attention_comes_from_triton_and_needs_no_queries(interpreted):
    """Of the same model, beside SGLang's own backend: two row blocks in three layers."""
    prompt, twin, name = (
        prompt_of(150, seed=10),
        interpreted.workers["tiny-twin"][0],
        "crossfill_reuse_map_layers_total",
    )
    before = packed_by(interpreted)
    leave(interpreted, "tiny-llama", prompt, "maps", new_tokens=2)
    until = time.monotonic() + 60
    while packed_by(interpreted) - before < 6:
        assert time.monotonic() < until, "the sender packed nothing"
        time.sleep(0.1)
    for attempt in range(10):
        mapped, calls = (
            interpreted.counter(twin, name, outcome="mapped"),
            triton_calls(interpreted, twin, "map_attention"),
        )
        skipped = interpreted.counter(twin, "crossfill_reuse_skipped_query_rows_total")
        found = generate(twin, prompt, "maps", new_tokens=2, key=f"attempt-{attempt}")
        mapped = interpreted.counter(twin, name, outcome="mapped") - mapped
        # The first layer is waited for, others may come too late for so small a model.
        if mapped == 3:
            break
    assert mapped == 3
    assert triton_calls(interpreted, twin, "map_attention") - calls == 3
    assert interpreted.counter(twin, "crossfill_reuse_skipped_query_rows_total") - skipped == 3 * 128
    dense = generate(twin, prompt, "maps", reuse="off", new_tokens=2)
    assert interpreted.counter(twin, "crossfill_reuse_skipped_query_rows_total") - skipped == 3 * 128
    assert max(differences(found, dense)) < 1e-3


def packed_by(stack):
    return stack.counter(stack.workers["tiny-llama"][0], "crossfill_reuse_packed_row_blocks_total")


def chat(stack, model, **more):
    """A worker's whole answer, less what differs from one call to the next."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(f"plain{n}" for n in range(60))}],
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        **more,
    }
    response = httpx.post(f"{stack.workers[model][0]}/v1/chat/completions", json=body, timeout=300)
    text = re.sub(r'"(id|created)":("[^"]*"|\d+)', r'"\1":0', response.text)
    return response, text.replace(model, "model")


def joined(stream):
    """A stream as one: its text, its log-probabilities, and every other part of its events once.

    How many tokens come in an event depends on how busy the machine is.
    """
    text, logprobs, rest = "", [], []
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            rest.append(line)
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event["choices"]:
            text += choice["delta"].pop("content", None) or ""
            logprobs += (choice.pop("logprobs", None) or {}).get("content") or []
        rest.append(json.dumps(event))
    return text, logprobs, list(dict.fromkeys(rest))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_without_reuse_an_answer_is_byte_for_byte_that_of_plain_sglang(interpreted, stream):
    exact = {"custom_params": {"crossfill": {"reuse": "off", "tenant": "acme"}}, "extra_key": "exact", "stream": stream}
    with_hooks, told = chat(interpreted, "tiny-qwen3", **exact)
    plain, expected = chat(interpreted, "plain", stream=stream)
    assert joined(told) == joined(expected) if stream else told == expected
    assert len(told) > 1000
    assert with_hooks.headers["x-crossfill-reuse"] == "none; reason=off"
    assert "x-crossfill-reuse" not in plain.headers
