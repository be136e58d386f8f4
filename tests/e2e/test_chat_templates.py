"""A chat template that refuses system turns, on real workers: a clear 400, or instructions within the user turn."""

import httpx
import pytest

pytestmark = pytest.mark.real

TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['user', 'assistant'] -%}{{ raise_exception('System role not supported') }}{%- endif -%}
<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant {% endif -%}
"""
SYSTEM = {"role": "system", "content": "Answer in verse."}
DEVELOPER = {"role": "developer", "content": "Be brief."}
USER = {"role": "user", "content": "What is rain?"}
MERGED = {"role": "user", "content": "Answer in verse.\n\nBe brief.\n\nWhat is rain?"}


@pytest.fixture
def service(start_stack, tmp_path):
    """A running stack of `strict` and `merging`: one tiny model each, with the template above."""
    template = tmp_path / "strict.jinja"
    template.write_text(TEMPLATE)
    stack = start_stack(
        {
            "listen": {"port": 0},
            "first_worker_port": 31400,
            "worker": {"extra_args": ["--chat-template", str(template)], "max_total_tokens": 2048},
            "models": [
                {"name": "strict", "source": "tiny-llama"},
                {"name": "merging", "source": "tiny-llama", "system_role": "user"},
            ],
        }
    )
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


def ask(service, model, *messages, stream=False):
    body = {"model": model, "messages": list(messages), "temperature": 0, "max_tokens": 8, "stream": stream}
    return service.post("/v1/chat/completions", json=body)


def said(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]["prompt_tokens"]


def test_templates_that_refuse_system_turns(service):
    for turns in ([SYSTEM, USER], [DEVELOPER, USER]):
        for stream in (False, True):
            refused = ask(service, "strict", *turns, stream=stream)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert "System role not supported" in error["message"]
            assert error["request_id"] == refused.headers["x-request-id"]
    plain = said(ask(service, "strict", USER))

    by_hand = said(ask(service, "merging", MERGED))
    assert said(ask(service, "merging", SYSTEM, DEVELOPER, USER)) == by_hand
    # Both models have the same weights: the instructions made the difference.
    assert said(ask(service, "merging", USER)) == plain
    assert by_hand[1] > plain[1]
    assert "data: [DONE]" in ask(service, "merging", SYSTEM, USER, stream=True).text
    assert service.get("/ready").json()["status"] == "ready"
