"""A worker prefills guided requests again when it has time, and takes nothing any more once quality has drifted."""

import time

import httpx
import pytest

pytestmark = pytest.mark.real

LARGE, SMALL = "tiny-llama", "tiny-qwen3"
WINDOW = 8


@pytest.fixture(scope="module")
def watched(start_module_stack):
    pair = {"sender": LARGE, "receiver": SMALL, "layers": [0, 0, 1, 1, 2, 3], "first_layer": 1, "top_p": 0.3}
    return start_module_stack(
        {
            "listen": {"port": 0},
            "first_worker_port": 31450,
            "worker": {"max_total_tokens": 16384},
            "models": [{"name": LARGE, "source": LARGE}, {"name": SMALL, "source": SMALL}],
            "reuse": {
                "pairs": [{**pair, "min_tokens": 64, "max_density": 1.0}],
                "wait_s": 10,
                "wait_share": 1e6,
                # Whatever these models say, it is not that near.
                "shadow": {"share": 1.0, "max_divergence": 1e-9, "window": WINDOW},
            },
        }
    )


def chat(stack, model, number, *, stream=False):
    """The word on reuse of a prompt that nobody else has."""
    words = " ".join(f"word{number}x{place}" for place in range(40))
    body = {"model": model, "messages": [{"role": "user", "content": words}], "max_tokens": 3, "stream": stream}
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.headers["x-crossfill-reuse"]


def wait_for(stack, url, compared):
    until = time.monotonic() + 60
    while stack.counter(url, "crossfill_reuse_shadows_total", result="compared") < compared:
        assert time.monotonic() < until, f"{compared} shadows did not come"
        time.sleep(0.1)


def test_sampled_requests_are_compared_until_quality_has_drifted(watched):
    sender, receiver = watched.workers[LARGE][0], watched.workers[SMALL][0]
    for number in range(WINDOW):
        chat(watched, LARGE, number)
        until = time.monotonic() + 60
        left = "crossfill_store_published_pages_total"
        while watched.counter(sender, left) < (number + 1) * 2 and time.monotonic() < until:
            time.sleep(0.1)
        told = chat(watched, SMALL, number, stream=number % 2 == 1)
        assert told.startswith("guided;"), told
        assert "shadow" not in told
        wait_for(watched, receiver, number + 1)
    assert watched.counter(receiver, "crossfill_reuse_shadow_divergence_nats_count") == WINDOW
    assert watched.counter(receiver, "crossfill_reuse_shadow_divergence_nats_sum") > WINDOW * 1e-9
    assert watched.counter(receiver, "crossfill_reuse_drifted", sender=LARGE) == 1
    # Shadows are nobody's requests.
    assert watched.counter(watched.url, "crossfill_requests_total") == 2 * WINDOW
    assert watched.counter(receiver, "crossfill_reuse_requests_total", mode="guided") == WINDOW
    assert watched.counter(receiver, "crossfill_reuse_requests_total", reason="off") == WINDOW
    # What it computed before is still in its own cache.
    assert chat(watched, SMALL, 0).startswith("none; reason=drifted")
    assert watched.counter(receiver, "crossfill_reuse_hook_failures_total") == 0
    # A sender has no shadows.
    assert watched.counter(sender, "crossfill_reuse_shadows_total") == 0
