"""A worker prefills guided prompts again densely when it is idle, and stops taking from a sender that misleads it."""

import re
import time

import httpx
import pytest

from cache_store.keys import page_keys
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.rows import BLOCK
from engines.reuse.mass_records import pack_masses
from tests.conftest import KEPT_LAYERS, LARGE, SMALL
from tests.e2e.test_guided_reuse import (
    STORY,
    TIMEOUT_S,
    chat,
    generate,
    leave,
    namespace_of,
    prompt_of,
    tokens_of,
)

pytestmark = pytest.mark.real

WINDOW = 8
LENGTH = 450
HEADS = 9
# What a calibration's gate lets pass; masses that all lie on one block come to .02 to .04 here, prompt by prompt.
LIMIT = 0.01


@pytest.fixture(scope="module")
def watched(start_module_stack, tmp_path_factory):
    """The demo pair, of which every guided prefill is compared."""
    pair = {"sender": LARGE, "receiver": SMALL, "layers": KEPT_LAYERS}
    return start_module_stack(
        {
            "listen": {"port": 0},
            "first_worker_port": 31500,
            "store": {"url": f"lmdb://{tmp_path_factory.mktemp('shadow-store')}/store"},
            "worker": {"chunked_prefill_size": 256, "max_total_tokens": 4096},
            "models": [{"name": LARGE, "source": LARGE}, {"name": SMALL, "source": SMALL}],
            "reuse": {
                "pairs": [{**pair, "min_tokens": 64, "max_density": 1.0}],
                "wait_s": 5.0,
                "wait_share": 1e6,
                "shadow": {"share": 1.0, "window": WINDOW, "max_divergence": LIMIT},
            },
        }
    )


@pytest.fixture(scope="module")
def prompts(models_root):
    """Token ids of numbered stories, each of which begins differently."""
    texts = ("\n".join(f"{seed}.{n} {line}" for n, line in enumerate(STORY * 8)) for seed in range(WINDOW))
    return [tokens_of(models_root, LARGE, text)[:LENGTH] for text in texts]


@pytest.fixture(scope="module")
def store(watched):
    from prometheus_client import CollectorRegistry

    from cache_store.config import StoreSettings
    from cache_store.metrics import StoreMetrics
    from cache_store.store import open_store

    router = (watched.logs.parent / "run" / "router.yaml").read_text()
    opened = open_store(
        StoreSettings(url=re.search(r"url: (lmdb://\S+)", router)[1]), StoreMetrics(CollectorRegistry())
    )
    yield opened
    opened.close()


def compared(stack):
    """Comparisons so far, and the sum of their divergences in nats."""
    name = "crossfill_reuse_shadow_divergence_nats"
    url = stack.workers[SMALL][0]
    return tuple(stack.counter(url, f"{name}_{part}", sender=LARGE) for part in ("count", "sum"))


def wait_until_compared(stack, count):
    until = time.monotonic() + TIMEOUT_S
    while compared(stack)[0] < count:
        assert time.monotonic() < until, "the idle worker compared nothing"
        time.sleep(0.1)


def drifted(stack):
    return stack.counter(stack.workers[SMALL][0], "crossfill_reuse_drifted", sender=LARGE)


def guided_requests(stack):
    return stack.counter(stack.workers[SMALL][0], "crossfill_reuse_requests_total", mode="guided")


def test_a_comparison_comes_after_the_answer_and_nobody_hears_of_it(watched, prompts):
    url, prompt = watched.workers[SMALL][0], prompts[0]
    leave(watched, LARGE, prompt, "quiet")
    before = compared(watched)
    finished = watched.counter(url, "sglang:num_requests_total")
    requests = watched.counter(url, "crossfill_reuse_requests_total")
    generate(url, prompt, "quiet", new_tokens=1)
    wait_until_compared(watched, before[0] + 1)
    # One request, one prefill by the worker's word; the comparison is in neither.
    assert watched.counter(url, "crossfill_reuse_requests_total") - requests == 1
    assert watched.counter(url, "sglang:num_requests_total") - finished == 1
    # A dense prefill of the prompt is in nobody's prefix cache.
    assert generate_cached(url, prompt, "quiet", "off") == 0
    assert generate_cached(url, prompt, "someone else", "allow") == 0
    assert generate_cached(url, prompt, "quiet", "allow") > 0
    assert "state was deleted" not in (watched.logs / f"{SMALL}-0.log").read_text()


def generate_cached(url, prompt, tenant, reuse):
    """Tokens of a prompt that a worker has in its own cache for a tenant."""
    said = {"reuse": reuse, "tenant": tenant, "salt": ""}
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "custom_params": {"crossfill": said}},
        "extra_key": f"{tenant}//{reuse}",
    }
    return httpx.post(f"{url}/generate", json=body, timeout=TIMEOUT_S).json()["meta_info"]["cached_tokens"]


def test_a_real_request_does_not_wait_for_the_whole_comparison(watched, prompts):
    url = watched.workers[SMALL][0]
    prompt = prompt_of(1500, seed=5)
    leave(watched, LARGE, prompt, "hasty")
    before, tries = compared(watched)[0], watched.counter(url, "crossfill_attention_rows_total", phase="extend")
    generate(url, prompt, "hasty", new_tokens=1)
    # The comparison begins as soon as the answer is out, in six chunks.
    time.sleep(0.5)
    generate(url, prompts[1], "hasty", new_tokens=1, reuse="off")
    assert compared(watched)[0] == before
    wait_until_compared(watched, before + 1)
    rows = watched.counter(url, "crossfill_attention_rows_total", phase="extend") - tries
    # Guided, interrupted after at least a chunk, and whole.
    assert rows >= 1500 + 256 + 1500 + LENGTH


def mislead(store, namespace, prompt):
    """Leave masses as the sender's that all lie on a block in the middle of what a row block can see."""
    import torch

    rows = len(prompt) // BLOCK
    masses = torch.zeros(HEADS, rows, rows)
    masses[:, torch.arange(rows), torch.arange(rows) // 2] = BLOCK
    mass = BlockMass(masses, torch.arange(rows, dtype=torch.int32), torch.full((rows,), float(BLOCK)))
    digests = [page.tokens_digest for page in page_keys(namespace.scope, prompt[: rows * BLOCK])]
    by_layer = [pack_masses(mass, layer, digests) for layer in KEPT_LAYERS[3:-1]]
    records = {row: [layer[row] for layer in by_layer] for row in range(rows)}
    assert store.publish(namespace, prompt, records).pages == rows


def test_real_masses_pass_and_misleading_ones_trip_the_gate(watched, store, models_root, prompts):
    """The control: masses that say nothing about the prompt."""
    url = watched.workers[SMALL][0]
    before = compared(watched)
    for number, prompt in enumerate(prompts):
        leave(watched, LARGE, prompt, "real")
        generate(url, prompt, "real", new_tokens=1)
        wait_until_compared(watched, before[0] + number + 1)
    real = (compared(watched)[1] - before[1]) / WINDOW
    assert drifted(watched) == 0
    namespace = namespace_of(models_root, LARGE, "control")
    before = compared(watched)
    for number, prompt in enumerate(prompts):
        mislead(store, namespace, prompt)
        guided = guided_requests(watched)
        generate(url, prompt, "control", new_tokens=1)
        assert guided_requests(watched) == guided + 1
        wait_until_compared(watched, before[0] + number + 1)
        if drifted(watched):
            break
    control = compared(watched)
    control = (control[1] - before[1]) / (control[0] - before[0])
    assert 1e-6 < real < LIMIT < control
    assert drifted(watched) == 1
    # From now on nothing is taken from that sender, not even what is true.
    text = " ".join(f"word{n}" for n in range(120))
    chat(watched.workers[LARGE][0], LARGE, text, "after")
    header = chat(url, SMALL, text, "after").headers["x-crossfill-reuse"]
    assert header == "none; reason=drifted"
    assert "answers have drifted" in "".join(log.read_text() for log in watched.logs.glob("*"))


def test_without_a_share_nothing_is_compared(stack, tenant_of_its_own):
    """The session's workers have reuse and no shadow."""
    url, prompt = stack.workers["tiny-qwen3"][0], prompt_of(200, seed=11)
    leave(stack, "tiny-llama", prompt, tenant_of_its_own)
    guided = stack.counter(url, "crossfill_reuse_requests_total", mode="guided")
    generate(url, prompt, tenant_of_its_own)
    assert stack.counter(url, "crossfill_reuse_requests_total", mode="guided") == guided + 1
    time.sleep(2)
    assert "crossfill_reuse_shadow" not in stack.get(f"{url}/metrics")


@pytest.fixture
def tenant_of_its_own():
    return "unwatched"
