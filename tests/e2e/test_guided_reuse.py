"""A prompt that the large model has seen is prefilled by the small one from what it left in the store."""

import itertools
import json
import random
import re
import time
from dataclasses import replace

import httpx
import pytest

from cache_store.config import StoreSettings
from cache_store.keys import page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.store import open_store
from engines.reuse.identity import read_identity

pytestmark = pytest.mark.real

TIMEOUT_S = 300
_numbers = itertools.count()


@pytest.fixture
def tenant():
    """One that nobody has used before."""
    return f"tenant-{next(_numbers)}"


def prompt_of(length, seed):
    """Token ids that stand for sentences no better than noise: for what must be equal, not for what must be good."""
    return random.Random(seed).choices(range(1000, 40_000), k=length)


def generate(url, prompt, tenant, *, reuse="allow", new_tokens=8, salt="", key=""):
    """The worker's answer to token ids, its log-probabilities, and its word on reuse in /generate's own way."""
    said = {"reuse": reuse, "tenant": tenant, "salt": salt}
    body = {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
            "custom_params": {"crossfill": said},
        },
        "return_logprob": True,
        "logprob_start_len": len(prompt),
        "extra_key": f"{tenant}/{salt}/{reuse}{key}",
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]["output_token_logprobs"]


def differences(one, other):
    """Of the log-probabilities of each next token, as far as the same tokens were chosen."""
    pairs = [(a[0] - b[0]) for a, b in zip(one, other, strict=True) if a[1] == b[1]]
    assert pairs
    return [abs(difference) for difference in pairs]


def wait_until_left(stack, url, pages, before):
    """What a sender leaves comes in the background."""
    until = time.monotonic() + 60
    while stack.counter(url, "crossfill_store_published_pages_total") - before < pages:
        assert time.monotonic() < until, "the sender left nothing"
        time.sleep(0.1)


def leave(stack, model, prompt, tenant, **more):
    """Have the sender prefill a prompt and leave its masses."""
    url = stack.workers[model][0]
    before = stack.counter(url, "crossfill_store_published_pages_total")
    answer = generate(url, prompt, tenant, **more)
    wait_until_left(stack, url, len(prompt) // 64, before)
    return answer


@pytest.fixture(scope="module")
def store(stack):
    """The store of the running stack, as one more of its processes."""
    from prometheus_client import CollectorRegistry

    router = (stack.logs.parent / "run" / "router.yaml").read_text()
    url = re.search(r"url: (lmdb://\S+)", router)[1]
    opened = open_store(StoreSettings(url=url), StoreMetrics(CollectorRegistry()))
    yield opened
    opened.close()


def namespace_of(models_root, model, tenant):
    identity = read_identity(model, models_root / model)
    return Namespace(tenant, model, identity.revision, identity.tokenizer, identity.template)


def test_all_mass_is_dense_prefill_in_chunks_and_the_path_ran(stack, tenant):
    """With top-p 1 a guided prefill looks everywhere, so log-probabilities are those of a dense one."""
    sender, receiver = "tiny-llama", "tiny-qwen3"
    url = stack.workers[receiver][0]
    prompt = prompt_of(300, seed=1)
    leave(stack, sender, prompt, tenant)
    calls = stack.counter(url, "crossfill_kernel_calls_total", op="guided_attention")
    blocks = stack.counter(url, "crossfill_reuse_row_blocks_total", outcome="guided")
    guided = generate(url, prompt, tenant)
    assert stack.counter(url, "crossfill_reuse_row_blocks_total", outcome="guided") - blocks == 4
    # Four chunks of 64 rows, four guided layers.
    assert stack.counter(url, "crossfill_kernel_calls_total", op="guided_attention") - calls == 16
    dense = generate(url, prompt, tenant, reuse="off")
    assert [token for _, token, _ in guided] == [token for _, token, _ in dense]
    assert max(differences(guided, dense)) < 1e-4


def test_the_small_model_looks_where_the_large_one_looked(stack, store, models_root, tenant):
    """Real masses change its log-probabilities little; the same masses on other pages much more."""
    url = stack.workers[stack.small][0]
    text = "\n".join(f"{n}. {line}" for n, line in enumerate(STORY * 12))
    prompt = tokens_of(models_root, stack.large, text)[:1000]
    leave(stack, stack.large, prompt, tenant)
    calls = stack.counter(url, "crossfill_kernel_calls_total", op="guided_attention")
    guided = generate(url, prompt, tenant)
    # 20 layers between the third and the last.
    assert stack.counter(url, "crossfill_kernel_calls_total", op="guided_attention") - calls == 20
    shuffle(store, namespace_of(models_root, stack.large, tenant), f"{tenant}-shuffled", prompt)
    shuffled = generate(url, prompt, f"{tenant}-shuffled")
    dense = generate(url, prompt, tenant, reuse="off")
    real, control = (sum(differences(one, dense)) for one in (guided, shuffled))
    assert real > 1e-4, "nothing was left out, so nothing was tested"
    assert control > 2 * real


STORY = [
    "The harbour of Lindholm has three piers, and the ferry to the islands leaves from the second.",
    "Marta keeps the log of every ship that comes in after dark, together with the names of their masters.",
    "A storm in the autumn of last year took the roof of the old salt store and half of the northern wall.",
    "The children of the village collect driftwood there, and the carpenter pays them a coin for each good plank.",
    "Nobody remembers who planted the two lime trees by the chapel, but everyone has an opinion about their height.",
]


def tokens_of(models_root, model, text):
    from engines.models.loading import import_transformers

    tokenizer = import_transformers("tests").AutoTokenizer.from_pretrained(models_root / model)
    return tokenizer(text)["input_ids"]


def shuffle(store, namespace, tenant, prompt):
    """Leave for another tenant what `namespace` has, each row block's column blocks in another order."""
    other = replace(namespace, tenant=tenant)
    records = {}
    pages, others = page_keys(namespace.scope, prompt), page_keys(other.scope, prompt)
    names = sorted(store.match(namespace, prompt).names)
    for index, (page, theirs) in enumerate(zip(pages, others, strict=True)):
        found = store.read(namespace, [(page, name) for name in names])
        records[index] = [
            replace(one, tokens_digest=theirs.tokens_digest, payload=mirrored(one)) for one in found if one is not None
        ]
    assert store.publish(other, prompt, records).pages == len(pages)


def mirrored(record):
    """A record of masses whose column blocks come in the opposite order."""
    import numpy as np

    heads, blocks = record.shape
    width = (blocks + 7) // 8
    data = np.frombuffer(record.payload, np.uint8)
    bits = np.unpackbits(data[: heads * width].reshape(heads, width), axis=1, count=blocks, bitorder="little")
    codes = np.split(data[heads * width :], np.cumsum(bits.sum(axis=1))[:-1])
    packed = np.packbits(bits[:, ::-1], axis=1, bitorder="little").tobytes()
    return packed + b"".join(of_head[::-1].tobytes() for of_head in codes)


def test_another_tenant_or_salt_finds_nothing(stack, tenant):
    url, prompt = stack.workers["tiny-qwen3"][0], prompt_of(200, seed=3)
    leave(stack, "tiny-llama", prompt, tenant)
    guided = stack.counter(url, "crossfill_reuse_requests_total", mode="guided")
    for other, salt in ((f"{tenant}-other", ""), (tenant, "salt")):
        generate(url, prompt, other, salt=salt)
    assert stack.counter(url, "crossfill_reuse_requests_total", mode="guided") == guided
    generate(url, prompt, tenant)
    assert stack.counter(url, "crossfill_reuse_requests_total", mode="guided") == guided + 1


def chat(url, model, prompt, tenant, *, stream=False, reuse="allow"):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": stream,
        "custom_params": {"crossfill": {"reuse": reuse, "tenant": tenant}},
        "extra_key": f"{tenant}/{reuse}",
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)


WORDS = " ".join(f"word{n}" for n in range(120))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_workers_header_says_what_was_reused(stack, tenant, stream):
    sender, receiver = (stack.workers[name][0] for name in ("tiny-llama", "tiny-qwen3"))
    before = stack.counter(sender, "crossfill_store_published_pages_total")
    assert chat(sender, "tiny-llama", WORDS, tenant).headers["x-crossfill-reuse"] == "none; reason=no_pair"
    wait_until_left(stack, sender, 3, before)
    first, again = (chat(receiver, "tiny-qwen3", WORDS, tenant, stream=stream) for _ in range(2))
    assert re.fullmatch(r"guided; blocks=\d+/\d+; density=1.00; sender=tiny-llama", first.headers["x-crossfill-reuse"])
    assert again.headers["x-crossfill-reuse"] == "none; reason=cached; prefix_hops=1"
    off = chat(receiver, "tiny-qwen3", WORDS, tenant, stream=stream, reuse="off")
    assert off.headers["x-crossfill-reuse"] == "none; reason=off"
    if stream:
        assert first.text.rstrip().endswith("data: [DONE]")
    assert "crossfill" not in first.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_required_reuse_that_is_refused_is_a_conflict_and_computes_nothing(stack, tenant, stream):
    url = stack.workers["tiny-qwen3"][0]
    rows = stack.counter(url, "crossfill_attention_rows_total", phase="extend")
    refused = chat(url, "tiny-qwen3", WORDS, tenant, stream=stream, reuse="require")
    assert refused.status_code == 409
    assert "nothing_stored" in json.loads(refused.text)["message"]
    # SGLang puts a single token in place of a prompt that it refuses.
    assert stack.counter(url, "crossfill_attention_rows_total", phase="extend") - rows <= 1
    leave_words(stack, tenant)
    assert chat(url, "tiny-qwen3", WORDS, tenant, stream=stream, reuse="require").status_code == 200


def leave_words(stack, tenant):
    sender = stack.workers["tiny-llama"][0]
    before = stack.counter(sender, "crossfill_store_published_pages_total")
    chat(sender, "tiny-llama", WORDS, tenant)
    wait_until_left(stack, sender, 3, before)
