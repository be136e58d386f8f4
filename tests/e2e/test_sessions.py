"""A growing conversation hits SGLang's prefix cache at every turn, and the router knows how much of it lies there."""

import re

import httpx
import pytest

from router.sessions.prompt import BLOCK_BYTES, read_prompt

pytestmark = pytest.mark.real

# Opens a think block where the answer begins and leaves it out of the history, so that no prompt is a strict prefix of
# the next one.
THINK_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

SYSTEM = "You help the crew of a small harbour with tides, ropes, permits and the weather. Be brief and friendly. " * 6
QUESTION = "Question {number}: when does the tide turn at the northern pier, and who has to be told before we leave?"
ANSWER = "At noon. Tell the harbour master on channel twelve."


def hold_conversation(url, model):
    """Three turns whose answers are replaced by a fixed string; of each: tokens cached, blocks matched, its prompt."""
    messages = [{"role": "system", "content": f"{SYSTEM} ({model})"}]
    turns = []
    for number in range(3):
        messages.append({"role": "user", "content": QUESTION.format(number=number)})
        body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        details = response.json()["usage"]["prompt_tokens_details"] or {}
        matched = re.search(r"blocks=(\d+), of=(\d+)", response.headers["x-crossfill-placement"])
        turns.append((details.get("cached_tokens", 0), int(matched[1]), read_prompt({"messages": messages}, b"")))
        messages.append({"role": "assistant", "content": ANSWER})
    return turns


def check(turns):
    (_, first_matched, _), *later = turns
    assert first_matched == 0
    for (_, _, before), (cached, matched, _) in zip(turns, later, strict=False):
        assert cached > 0
        assert 0 < matched <= len(before.blocks)
        # All whole blocks of the turn before are found; only the rest behind the last one is not.
        assert matched * BLOCK_BYTES > before.size_bytes - BLOCK_BYTES
    assert later[1][0] > later[0][0]


@pytest.mark.parametrize("model", ["large", "tiny-qwen3"])
def test_each_turn_finds_the_turn_before_in_the_cache(stack, model):
    name = stack.large if model == "large" else model
    counters = ("crossfill_affinity_matched_blocks_total", "crossfill_affinity_prompt_blocks_total")
    before = [stack.counter(stack.url, counter) for counter in counters]
    turns = hold_conversation(stack.url, name)
    check(turns)
    gained = [stack.counter(stack.url, counter) - was for counter, was in zip(counters, before, strict=True)]
    assert gained == [sum(matched for _, matched, _ in turns), sum(len(prompt.blocks) for *_, prompt in turns)]


def test_each_turn_finds_the_turn_before_when_the_template_opens_a_think_block(start_stack, tmp_path):
    template = tmp_path / "think.jinja"
    template.write_text(THINK_TEMPLATE)
    worker = {"chunked_prefill_size": 64, "max_total_tokens": 8192, "extra_args": ["--chat-template", str(template)]}
    running = start_stack(
        {
            "listen": {"port": 0},
            "first_worker_port": 31500,
            "models": [{"name": "thinker", "source": "tiny-qwen3", "worker": worker}],
        }
    )
    check(hold_conversation(running.url, "thinker"))
