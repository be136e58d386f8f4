from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.decision.policy import decide_explicit
from router.dispatch.affinity import Placement, PlacementReason
from router.dispatch.workers import WorkerPool
from router.request.generation import parse_chat
from router.sessions.memory import Sessions
from router.sessions.prefix_mirror import ENTRY_BYTES, PrefixMatch, PrefixMirror
from router.sessions.prompt import Prompt, read_prompt
from router.telemetry.metrics import SessionMetrics
from router.telemetry.record import RequestRecord


def path_prompt(path: str) -> Prompt:
    """A prompt whose blocks are the prefixes of `path`: a node of a tree, with a turn as a leaf below it."""
    return Prompt(
        blocks=tuple(path[: end + 1].encode() for end in range(len(path))), turn=f"{path}!".encode(), size_bytes=1
    )


paths = st.lists(st.text("ab", max_size=7), max_size=60)


@given(paths, st.integers(0, 30))
def test_the_set_stays_closed_under_prefixes_and_within_its_capacity(added: list[str], capacity: int) -> None:
    mirror = PrefixMirror(capacity)
    evicted = 0
    for path in added:
        evicted += mirror.add(path_prompt(path))
        assert len(mirror) <= capacity
        for known in added:
            *nodes, leaf = [*path_prompt(known).blocks, path_prompt(known).turn]
            chain = [node in mirror for node in (*nodes, leaf) if node is not None]
            assert chain == sorted(chain, reverse=True)
            assert mirror.match(path_prompt(known)).blocks == sum(node in mirror for node in nodes)
    assert evicted >= len({node for path in added for node in (*path_prompt(path).blocks, path)}) - capacity


def test_the_least_recently_used_prompt_goes_first() -> None:
    mirror = PrefixMirror(8)
    for path in ("aaa", "bbb"):
        assert mirror.add(path_prompt(path)) == 0
    mirror.add(path_prompt("aaa"))
    assert mirror.add(path_prompt("cc")) == 3
    assert mirror.match(path_prompt("aaa")).blocks == 3
    # Its leaf and its deepest blocks are gone, its first block is still known.
    assert mirror.match(path_prompt("bbb")).blocks == 1


def test_a_prefix_that_many_prompts_leave_is_shared() -> None:
    mirror = PrefixMirror(100)
    seen = []
    for end in "abcdef":
        seen.append(mirror.match(path_prompt(f"ss{end}")))
        mirror.add(path_prompt(f"ss{end}"))
        # The same prompt again is nothing new.
        mirror.add(path_prompt(f"ss{end}"))
    assert [match.blocks for match in seen] == [0, 2, 2, 2, 2, 2]
    assert [match.is_shared for match in seen] == [False] * 5 + [True]
    assert not mirror.match(path_prompt("ssa")).is_shared


def test_known_turns_are_counted_up_to_the_latest() -> None:
    mirror = PrefixMirror(100)
    mirror.add(Prompt(turn=b"2"))
    assert mirror.match(Prompt(earlier=(b"3", b"2", b"1"))) == PrefixMatch(turns=2)
    assert mirror.match(Prompt(earlier=(b"4",))) == PrefixMatch()


def test_a_cleared_mirror_knows_nothing() -> None:
    mirror = PrefixMirror(100)
    mirror.add(path_prompt("aaa"))
    mirror.clear()
    assert mirror.match(path_prompt("aaa")) == PrefixMatch()


def test_memory_is_capped_whatever_comes_and_evictions_are_counted() -> None:
    budget_bytes, prompts = 2 * 2**20, 6_000
    models = [{"name": "m", "workers": ["http://a", "http://b"]}]
    config = RouterConfig.model_validate({"models": models, "affinity": {"mirror_bytes": budget_bytes}})
    registry = CollectorRegistry()
    pool, metrics = WorkerPool(config.models, config.affinity), SessionMetrics(registry)
    sessions = Sessions(config, pool, metrics)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(prompts):
            payload = {"model": "m", "messages": [{"role": "user", "content": f"{number} ".ljust(4096, "x")}]}
            record = RequestRecord("r", 0.0, decision=decide_explicit("r", "m", tau=0.3, sigma=0.1))
            sessions.situation(record, parse_chat(payload, config.limits), "ns")
            record.placement = Placement(pool.workers[number % 2], PlacementReason.NO_MATCH)
            sessions.answered(record)
            del record, payload
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    entries = sum(len(worker.prefixes) for worker in pool.workers)
    evicted = registry.get_sample_value("crossfill_affinity_evictions_total")
    # 16 blocks and a turn for each prompt.
    assert entries + (evicted or 0) == 17 * prompts
    assert entries == budget_bytes // 2 // ENTRY_BYTES * 2
    assert after - before < budget_bytes
    # One prompt's own text and digests come on top.
    assert peak - before < budget_bytes + 2**16


def test_the_mirror_of_a_disabled_affinity_stays_empty() -> None:
    models = [{"name": "m", "workers": ["http://a"]}]
    config = RouterConfig.model_validate({"models": models, "affinity": {"enabled": False}})
    pool = WorkerPool(config.models, config.affinity)
    sessions = Sessions(config, pool, SessionMetrics(CollectorRegistry()))
    record = RequestRecord("r", 0.0, decision=decide_explicit("r", "m", tau=0.3, sigma=0.1))
    payload = {"model": "m", "messages": [{"role": "user", "content": "x" * 4096}]}
    pool.workers[0].probe_succeeded()
    sessions.situation(record, parse_chat(payload, config.limits), "ns")
    record.placement = pool.pick("m", (), record.prompt)
    sessions.answered(record)
    assert record.prompt == Prompt() != read_prompt(payload, b"ns")
    assert len(pool.workers[0].prefixes) == 0
