"""Conversations through the router that go from model to model: what one has read the next one does not read anew."""

import re

import httpx
import pytest

from router.tenants.namespace import LOCAL_TENANT

from .test_guided_reuse import STORY, TIMEOUT_S, namespace_of, store, wait_until_left  # noqa: F401  # a fixture

pytestmark = pytest.mark.real

QUESTIONS = [
    "Who keeps the log?",
    "And what burnt down?",
    "How many piers are there?",
    "Which trees?",
    "Why?",
    "Thanks.",
]


def ask(stack, model, messages, **more):
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response


def outcome(response):
    return response.headers["x-crossfill-reuse"]


def document(title, times=8):
    return f"{title}\n" + "\n".join(f"{n}. {line}" for n, line in enumerate(STORY * times))


def test_a_long_first_turn_of_the_large_model_guides_the_next_of_the_small_one(stack):
    sender = stack.workers[stack.large][0]
    before = stack.counter(sender, "crossfill_store_published_pages_total")
    messages = [{"role": "user", "content": document("First turn") + QUESTIONS[0]}]
    first = ask(stack, stack.large, messages)
    wait_until_left(stack, sender, 10, before)
    answer = first.json()["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": QUESTIONS[1]}]
    exact = ask(stack, stack.small, messages, crossfill={"reuse": "off"})
    second = ask(stack, stack.small, messages)
    assert outcome(first) == "none; reason=no_pair"
    assert outcome(exact) == "none; reason=off"
    guided, prompt = map(int, re.fullmatch(r"guided; blocks=(\d+)/(\d+); .*", outcome(second)).groups())
    assert guided >= 0.9 * prompt
    assert "crossfill" not in second.json()


def test_six_turns_with_three_switches_find_their_prefix_in_the_store(stack, store, models_root):  # noqa: F811
    from engines.models.loading import import_transformers

    tokenizer = import_transformers("tests").AutoTokenizer.from_pretrained(models_root / stack.large)
    large, small = stack.large, stack.small
    messages, sender = [], stack.workers[large][0]
    for turn, (model, question) in enumerate(zip([large, small, small, large, large, small], QUESTIONS, strict=True)):
        # About 2,000 tokens. The pages of short turns and of answers are cut by turns, so nobody leaves them.
        text = document("Six turns", times=16) + question if turn == 0 else question
        messages.append({"role": "user", "content": text})
        if turn == 5:
            break
        before = stack.counter(sender, "crossfill_store_published_pages_total")
        answer = ask(stack, model, messages).json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
        if turn == 0:
            wait_until_left(stack, sender, 10, before)
    prefix = tokenizer.apply_chat_template(messages[:-1], tokenize=True, return_dict=True)["input_ids"]
    coverage = store.match(namespace_of(models_root, large, LOCAL_TENANT), prefix)
    assert sum(map(bool, coverage.records)) >= 0.9 * len(coverage.pages)
    # The control: the small model has left nothing.
    assert not store.match(namespace_of(models_root, small, LOCAL_TENANT), prefix).names
    # It has its earlier turns itself, the first of which was guided, and says so.
    assert re.fullmatch(r"none; reason=(cached|too_little); prefix_hops=1", outcome(ask(stack, small, messages)))
    assert outcome(ask(stack, small, messages, crossfill={"reuse": "off"})) == "none; reason=off"


@pytest.mark.parametrize("more", [{"n": 2}, {"n": 2, "stream": True}, {"stream": True}], ids=str)
def test_several_choices_say_how_their_prompt_was_prefilled(stack, more):
    sender = stack.workers["tiny-llama"][0]
    before = stack.counter(sender, "crossfill_store_published_pages_total")
    messages = [{"role": "user", "content": " ".join(f"choice{more}{n}" for n in range(100))}]
    ask(stack, "tiny-llama", messages)
    wait_until_left(stack, sender, 3, before)
    answer = ask(stack, "tiny-qwen3", messages, **more)
    assert outcome(answer).startswith("guided; ")
    assert outcome(ask(stack, "tiny-qwen3", messages, **more)).startswith("none; reason=cached; prefix_hops=1")


def test_a_stream_says_it_too_and_the_routers_ttft_knows_it(stack):
    sender = stack.workers["tiny-llama"][0]
    before = stack.counter(sender, "crossfill_store_published_pages_total")
    messages = [{"role": "user", "content": " ".join(f"stream{n}" for n in range(150))}]
    ask(stack, "tiny-llama", messages)
    wait_until_left(stack, sender, 3, before)
    labels = {"model": "tiny-qwen3", "reuse": "guided"}
    seen = stack.counter(stack.url, "crossfill_ttft_seconds_count", **labels)
    body = {"model": "tiny-qwen3", "messages": messages, "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as response:
        assert response.headers["x-crossfill-reuse"].startswith("guided; ")
        assert response.read().rstrip().endswith(b"data: [DONE]")
    assert stack.counter(stack.url, "crossfill_ttft_seconds_count", **labels) == seen + 1
