"""Text completions, and requests as loosely filled in as OpenAI allows, on real workers."""

import httpx
import openai
import pytest

pytestmark = pytest.mark.real

PROMPT = "Water boils at"


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_a_prompt_is_continued_by_sixteen_tokens_unless_asked_otherwise(client, stack):
    answer = client.completions.create(model=stack.large, prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    assert (answer.object, answer.model) == ("text_completion", stack.large)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 16
    echoed = client.completions.create(model=stack.large, prompt=PROMPT, temperature=0, max_tokens=2, echo=True)
    assert echoed.choices[0].text.startswith(PROMPT)
    assert 1 <= echoed.usage.completion_tokens <= 2
    scored = client.completions.create(model=stack.large, prompt=PROMPT, temperature=0, max_tokens=2, logprobs=2)
    assert 1 <= len(scored.choices[0].logprobs.token_logprobs) <= 2


def test_a_stream_of_two_prompts_finishes_each_choice_once(client, stack):
    before = stack.counter(stack.url, "crossfill_ttft_seconds_count", model="tiny-llama")
    stream = client.completions.create(
        model="tiny-llama",
        prompt=[PROMPT, "Ice melts at"],
        n=2,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(finished) == [0, 1, 2, 3]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert stack.counter(stack.url, "crossfill_ttft_seconds_count", model="tiny-llama") == before + 1


def test_token_ids_are_refused_and_the_worker_lives(client):
    with pytest.raises(openai.BadRequestError, match="token ids"):
        client.completions.create(model="tiny-llama", prompt=[10**9], max_tokens=1)
    assert client.completions.create(model="tiny-llama", prompt=PROMPT, max_tokens=1).choices


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_nulls_mean_the_default(stack, path):
    nulls = dict.fromkeys(
        (
            *("n", "stream", "stream_options", "logprobs", "temperature", "top_p", "stop", "seed", "user"),
            *("presence_penalty", "frequency_penalty", "logit_bias", "tools", "tool_choice", "parallel_tool_calls"),
            *("response_format", "top_logprobs", "best_of", "echo", "suffix", "max_tokens", "min_tokens"),
        )
    )
    # A field of the other endpoint is unknown to this one and stays; SGLang ignores what it does not know either.
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4}
    asked = chat if path.startswith("chat") else {"prompt": PROMPT}
    response = httpx.post(f"{stack.url}/v1/{path}", json={"model": "tiny-llama", **nulls, **asked}, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] in {"stop", "length"}
