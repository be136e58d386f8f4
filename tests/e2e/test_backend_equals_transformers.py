"""Real workers on our attention backend against transformers: the same greedy tokens, log-probabilities within 1e-4."""

import asyncio
import random

import aiohttp
import pytest
import torch

pytestmark = pytest.mark.real

TOLERANCE = 1e-4
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def reference(models_root):
    """Log-probabilities of a sequence under transformers' own eager attention, in float32."""
    from engines import torchvision_stub

    torchvision_stub.install()
    from transformers import AutoModelForCausalLM

    loaded = {}

    def log_probabilities(name, tokens):
        if name not in loaded:
            loaded[name] = AutoModelForCausalLM.from_pretrained(
                models_root / name, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        with torch.inference_mode():
            return loaded[name](torch.tensor([tokens])).logits[0].log_softmax(-1)

    return log_probabilities


def prompt_of(length, seed):
    return random.Random(seed).sample(range(100, 40_000), length)


async def generate(session, url, prompt, **extra):
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        **extra,
    }
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["meta_info"]


def assert_equals_reference(reference, name, prompt, answer):
    """Log-probabilities of the prompt and of the new tokens, and that each new token is the reference's best one."""
    got = answer["input_token_logprobs"][1:] + answer["output_token_logprobs"]
    tokens = [token for _, token, _ in got]
    new = [token for _, token, _ in answer["output_token_logprobs"]]
    assert tokens == prompt[1:] + new
    assert len(new) == NEW_TOKENS
    table = reference(name, prompt + new)
    want = table[torch.arange(len(tokens)), torch.tensor(tokens)]
    torch.testing.assert_close(torch.tensor([value for value, _, _ in got]), want, atol=TOLERANCE, rtol=0)
    assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == new


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200, 333], ids=lambda n: f"{n}-tokens")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
async def test_prompts_of_any_length_in_chunks_of_64(stack, reference, name, length):
    url = stack.workers[name][0]
    passes = stack.counter(url, "crossfill_attention_passes_total", phase="extend")
    rows = stack.counter(url, "crossfill_attention_rows_total", phase="extend")
    calls = stack.counter(url, "crossfill_kernel_calls_total", op="paged_attention", implementation="native")
    prompt = prompt_of(length, seed=length)
    async with aiohttp.ClientSession() as session:
        answer = await generate(session, url, prompt)
    assert_equals_reference(reference, name, prompt, answer)
    now = stack.counter(url, "crossfill_kernel_calls_total", op="paged_attention", implementation="native")
    assert now - calls > 0
    assert stack.counter(url, "crossfill_attention_passes_total", phase="extend") - passes == -(-length // 64)
    assert stack.counter(url, "crossfill_attention_rows_total", phase="extend") - rows == length


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
async def test_batches_of_mixed_lengths(stack, reference, name):
    url = stack.workers[name][0]
    before = {
        kind: stack.counter(url, f"crossfill_attention_{kind}_total", phase="decode") for kind in ("rows", "passes")
    }
    prompts = [prompt_of(length, seed=1000 + length) for length in (3, 40, 90, 17, 150, 61)]
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(generate(session, url, prompt) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_equals_reference(reference, name, prompt, answer)
    rows, passes = (
        stack.counter(url, f"crossfill_attention_{kind}_total", phase="decode") - before[kind] for kind in before
    )
    assert rows > passes, "the requests were decoded one by one: no batch was tested"


@pytest.mark.parametrize("length", [5, 120, 700], ids=lambda n: f"{n}-tokens")
async def test_the_large_model(stack, reference, length):
    prompt = prompt_of(length, seed=2000 + length)
    async with aiohttp.ClientSession() as session:
        answer = await generate(session, stack.workers[stack.large][0], prompt)
    assert_equals_reference(reference, stack.large, prompt, answer)


async def test_the_small_model(stack, reference):
    prompt = prompt_of(150, seed=7)
    async with aiohttp.ClientSession() as session:
        answer = await generate(session, stack.workers[stack.small][0], prompt)
    assert_equals_reference(reference, stack.small, prompt, answer)
    # Control: the two models of the pair really differ.
    with pytest.raises(AssertionError):
        assert_equals_reference(reference, stack.large, prompt, answer)


async def test_a_prefix_hit_computes_only_the_new_rows_and_answers_the_same(stack, reference):
    name = "tiny-llama"
    url = stack.workers[name][0]
    prompt = prompt_of(300, seed=31)
    async with aiohttp.ClientSession() as session:
        first = await generate(session, url, prompt)
        rows = stack.counter(url, "crossfill_attention_rows_total", phase="extend")
        longer = prompt + prompt_of(2, seed=32)
        # Log-probabilities of the prompt would make SGLang compute it all; those of new tokens do not.
        second = await generate(session, url, longer, logprob_start_len=len(longer))
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == 300
    assert stack.counter(url, "crossfill_attention_rows_total", phase="extend") - rows == 2
    new = [token for _, token, _ in second["output_token_logprobs"]]
    table = reference(name, longer + new)[len(longer) - 1 : -1]
    assert table.argmax(-1).tolist() == new
    got = torch.tensor([value for value, _, _ in second["output_token_logprobs"]])
    torch.testing.assert_close(got, table[torch.arange(NEW_TOKENS), torch.tensor(new)], atol=TOLERANCE, rtol=0)
