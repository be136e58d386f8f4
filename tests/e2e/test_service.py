"""The main job: one endpoint over two real models, used through the official openai SDK."""

import json

import httpx
import openai
import pytest

pytestmark = pytest.mark.real

EASY = "What is the capital of France?"
HARD = (
    "Prove step by step that the square root of 2 is irrational, then implement a Python function that approximates it "
    "with Newton's method, and explain why the method converges quadratically."
)


def ask(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_the_large_model_by_name_knows_the_capital_of_france(client, stack):
    answer = client.chat.completions.create(model=stack.large, messages=ask(EASY), temperature=0, max_tokens=24)
    assert "Paris" in answer.choices[0].message.content
    assert answer.model == stack.large
    assert answer.usage.completion_tokens > 0


def test_the_small_model_answers_sanely(client, stack):
    answer = client.chat.completions.create(model=stack.small, messages=ask(EASY), temperature=0, max_tokens=24)
    assert "Paris" in answer.choices[0].message.content
    assert answer.model == stack.small


def test_auto_sends_an_easy_and_a_hard_query_to_different_models(client, stack):
    served = {}
    for text in (EASY, HARD):
        raw = client.chat.completions.with_raw_response.create(
            model="auto", messages=ask(text), max_tokens=4, extra_headers={"x-request-id": "e2e-1"}
        )
        served[text] = raw.parse().model
        assert raw.headers["x-crossfill-model"] == served[text]
        assert raw.headers["x-request-id"] == "e2e-1"
    assert served == {EASY: stack.small, HARD: stack.large}


def test_the_dry_run_tells_what_the_real_request_then_does(client, stack):
    body = {"model": "auto", "messages": ask(HARD), "max_tokens": 1}
    headers = {"x-request-id": "e2e-2"}
    dry = httpx.post(f"{stack.url}/v1/route", json=body, headers=headers).json()
    real = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert dry["model"] == real.headers["x-crossfill-model"] == stack.large
    assert json.loads(real.headers["x-crossfill-decision"])["noise"] == dry["noise"]


def test_a_stream_arrives_in_pieces_with_usage_at_the_end(client, stack):
    before = stack.counter(stack.url, "crossfill_ttft_seconds_count", model=stack.large)
    stream = client.chat.completions.create(
        model=stack.large,
        messages=ask(EASY),
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert stack.counter(stack.url, "crossfill_ttft_seconds_count", model=stack.large) == before + 1


def test_a_repeated_prompt_hits_sglangs_prefix_cache(client, stack):
    question = ask("Here is a list of numbers: " + ", ".join(map(str, range(150))) + ". Which is the largest?")

    def cached():
        answer = client.chat.completions.create(model=stack.large, messages=question, temperature=0, max_tokens=1)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens

    (first, total), (second, _) = cached(), cached()
    assert first < 64 <= total
    assert second >= total - 2


def test_another_cache_salt_does_not_share_the_prefix_cache(client, stack):
    question = ask("Repeat after me: " + "the quick brown fox jumps over the lazy dog. " * 12)

    def cached(**extra):
        answer = client.chat.completions.create(
            model=stack.small, messages=question, temperature=0, max_tokens=1, extra_body=extra
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    cached()
    assert cached() > 64
    assert cached(cache_salt="another") < 8


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "gpt-none"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
    ],
    ids=["unknown-model", "no-messages", "wrong-type"],
)
def test_errors_are_the_sdks_own(client, stack, change, error, param):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": stack.large, "messages": ask(EASY), **change})
    assert caught.value.body["param"] == param
    assert caught.value.request_id


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_beyond_the_models_context_is_the_workers_400(client, stack, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny-llama", messages=ask("word " * 9000), max_tokens=4, stream=stream)
    assert "length" in caught.value.message
    assert client.chat.completions.create(model="tiny-llama", messages=ask("hi"), max_tokens=1).choices


def test_models_are_listed_and_retrievable_one_by_one(client, stack):
    names = {model.id for model in client.models.list()}
    assert names >= {"auto", stack.small, stack.large}
    assert all(client.models.retrieve(name).id == name for name in names)
    assert httpx.get(f"{stack.url}/ready").json()["status"] == "ready"
