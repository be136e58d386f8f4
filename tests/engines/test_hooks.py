"""The hooks alone: a defect of ours never fails a request, and what the scheduler said becomes one header."""

import logging
from array import array
from types import SimpleNamespace

import pytest
import torch
from fastapi import HTTPException

from engines.hooks import HEADER, AnswerHooks, ReuseHeader, SchedulerHooks
from engines.reuse.asked import Asked, Mode, read_asked
from engines.reuse.provenance import Provenance
from engines.reuse.refusal import Refusal


class Engine:
    """Notes its calls; refuses what it is told to refuse."""

    def __init__(self, refusal=None):
        self.calls, self.refusal, self.provenance = [], refusal, Provenance(8)

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append((name, *arguments, *named.items()))
            return {"is_new": True, "outcome": "guided; blocks=1/2"}.get(name, self.refusal)

        return call


def said(mode="allow"):
    return {"crossfill": {"reuse": mode, "tenant": "acme", "salt": "s"}}


def request(mode="allow", rid="r"):
    aborted = []
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=array("q", [1, 2]),
        output_ids=array("q"),
        retraction_count=0,
        sampling_params=SimpleNamespace(custom_params=said(mode)),
        full_untruncated_fill_ids=[1, 2],
        customized_info=None,
        to_finish=None,
        aborted=aborted,
        set_finish_with_abort=lambda *arguments: aborted.append(arguments),
    )


def received(**more):
    fields = ("mm_inputs", "input_embeds", "lora_id", "session_params", "positional_embed_overrides")
    return SimpleNamespace(**{**dict.fromkeys(fields), **more})


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        (said(), Asked(Mode.ALLOW, "acme", "s")),
        ({"crossfill": {"reuse": "off", "tenant": "a"}}, Asked(Mode.OFF, "a")),
        (None, None),
        ({}, None),
        ({"crossfill": "off"}, None),
        ({"crossfill": {"reuse": "sometimes", "tenant": "a"}}, None),
        ({"crossfill": {"reuse": "allow"}}, None),
        ({"crossfill": {"reuse": "allow", "tenant": ""}}, None),
        ({"crossfill": {"reuse": "allow", "tenant": "a", "salt": 7}}, None),
    ],
)
def test_only_what_a_router_says_in_full_is_understood(told, asked):
    assert read_asked(told) == asked


def test_before_the_model_is_loaded_nothing_is_done():
    hooks = SchedulerHooks()
    hooks.after_create(request(), None, received())
    hooks.before_abort(None, SimpleNamespace(abort_all=True, rid=""))
    hooks.before_weights(None)


@pytest.mark.parametrize("more", [{}, {"mm_inputs": object()}, {"lora_id": "x"}], ids=["text", "images", "adapter"])
def test_a_request_is_told_of_with_its_tokens_and_whether_they_say_all(more):
    hooks = SchedulerHooks()
    hooks.engine = Engine()
    hooks.after_create(made := request(), None, received(**more))
    asked = Asked(Mode.ALLOW, "acme", "s")
    assert hooks.engine.calls == [("arrive", "r", asked, made.origin_input_ids, ("supported", not more))]


def test_a_required_reuse_that_is_surely_refused_is_aborted_at_its_arrival():
    hooks = SchedulerHooks()
    hooks.engine = Engine(Refusal.TOO_SHORT)
    hooks.after_create(made := request("require"), None, received())
    [(message, status, kind)] = made.aborted
    assert (int(status), kind) == (409, "ReuseRefused")
    assert "too_short" in message
    hooks.after_create(other := request("allow"), None, received())
    assert other.aborted == []


def batch(*requests, prefix=0):
    pool = SimpleNamespace(req_to_token=torch.arange(8, dtype=torch.int32).expand(4, 8))
    return SimpleNamespace(reqs=requests, prefix_lens=[prefix] * len(requests), req_to_token_pool=pool)


def forward(is_extend=True, count=1):
    mode = SimpleNamespace(is_extend=lambda: is_extend)
    return SimpleNamespace(forward_mode=mode, req_pool_indices=torch.arange(count))


def test_a_batch_freezes_plans_and_notes_the_outcome():
    hooks = SchedulerHooks()
    hooks.engine = Engine()
    hooks.after_batch(forward(), None, batch(made := request()))
    assert ("admit", "r", 0, 2, ("hops", 0)) in hooks.engine.calls
    assert made.customized_info == {"crossfill": ["guided; blocks=1/2"]}
    assert made.to_finish is None
    hooks.engine.calls.clear()
    hooks.after_batch(forward(is_extend=False), None, batch(request()))
    assert hooks.engine.calls == []


def test_a_batch_tells_how_exact_the_own_cache_of_a_prompt_is():
    hooks = SchedulerHooks()
    hooks.engine = Engine()
    hooks.engine.provenance.extend(torch.arange(4), 0, 3)
    for prefix, hops in ((3, 0), (4, 1)):
        hooks.after_batch(forward(), None, batch(request(), prefix=prefix))
        assert ("admit", "r", prefix, 2, ("hops", hops)) in hooks.engine.calls


def test_what_is_told_of_a_request_is_told_once_and_not_once_a_token():
    level = SchedulerHooks().after_level
    assert [level(False, None, "crossfill"), level(False, None, "x"), level(True, None, "x")] == [True, False, True]


def test_a_required_reuse_that_is_refused_late_ends_the_request():
    hooks = SchedulerHooks()
    hooks.engine = Engine(Refusal.TOO_DENSE)
    hooks.after_batch(forward(count=2), None, batch(made := request("require"), other := request("allow")))
    assert made.to_finish.to_json()["status_code"] == 409
    assert made.customized_info["crossfill"][0].endswith("; refused=yes")
    assert other.to_finish is None


@pytest.mark.parametrize(
    ("refusal", "prefix", "refused"),
    [
        (Refusal.CACHED, 500, False),
        (Refusal.TOO_LITTLE, 500, False),
        (Refusal.NOTHING_STORED, 500, False),
        (Refusal.NOTHING_STORED, 20, True),
        (Refusal.STORE_SLOW, 500, True),
    ],
)
def test_a_prompt_in_the_own_cache_is_reuse_too(refusal, prefix, refused):
    hooks = SchedulerHooks()
    hooks.engine = Engine(refusal)
    hooks.after_batch(forward(), None, batch(made := request("require"), prefix=prefix))
    assert (made.to_finish is not None) == refused


def test_an_answer_that_has_begun_is_never_refused():
    hooks = SchedulerHooks()
    hooks.engine = Engine(Refusal.STORE_SLOW)
    begun = request("require")
    begun.output_ids = array("q", [3])
    retracted = request("require", rid="other")
    retracted.retraction_count = 1
    hooks.after_batch(forward(count=2), None, batch(begun, retracted))
    assert begun.to_finish is None
    assert retracted.to_finish is None


@pytest.mark.parametrize("more", [{}, {"lora_id": "x"}], ids=["text", "adapter"])
def test_a_retracted_request_arrives_again_with_what_it_has_answered(more):
    hooks = SchedulerHooks()
    hooks.engine = Engine()
    hooks.after_create(made := request(), None, received(**more))
    hooks.engine.calls.clear()
    made.output_ids = array("q", [3])
    hooks.after_retract(None, made)
    asked = Asked(Mode.ALLOW, "acme", "s")
    assert hooks.engine.calls == [("arrive", "r", asked, array("q", [1, 2, 3]), ("supported", not more))]


@pytest.mark.parametrize(("all_of_them", "prefix"), [(False, "r"), (True, "")])
def test_aborted_requests_are_forgotten(all_of_them, prefix):
    hooks = SchedulerHooks()
    hooks.engine = Engine()
    hooks.before_abort(None, SimpleNamespace(abort_all=all_of_them, rid="r"))
    assert hooks.engine.calls == [("forget_all", prefix)]


def test_a_request_that_ends_without_a_turn_is_forgotten():
    hooks = SchedulerHooks()
    hooks.before_abort_output(None, SimpleNamespace(rid="r"), request())
    hooks.engine = Engine()
    hooks.before_abort_output(None, SimpleNamespace(rid="r"), request())
    assert hooks.engine.calls == [("forget", "r")]


def test_a_hook_that_fails_is_logged_and_the_request_goes_on(caplog):
    hooks = SchedulerHooks()
    hooks.engine = Engine()
    with caplog.at_level(logging.WARNING, "crossfill.hooks"):
        hooks.after_create(SimpleNamespace(), None, received())
    assert "after_create failed" in caplog.text
    assert hooks.engine.calls == [("count_failure", "after_create")]


async def answered(hooks, mode="allow", *, stream=True, outcome="guided; blocks=1/2", rid="r", conflict=False):
    """What comes of an answer whose request had this outcome, and the scope in which it is sent."""
    raw = SimpleNamespace(scope={})
    params = {"custom_params": said(mode) if mode else None}
    adapted = SimpleNamespace(rid=rid, stream=stream, sampling_params=params)

    async def answer(*_):
        told = [outcome]
        if isinstance(rid, list):
            # Of several prompts SGLang makes lists, in place; requests of several choices get ids of their own.
            adapted.sampling_params = [params] * len(rid)
            told += ["none; reason=cached"] * (len(rid) - 1)
        for number, one in enumerate(told):
            meta_info = {"id": f"{rid}" if mode is None else f"own-{number}", "crossfill": [one]}
            hooks.after_meta_info(None, None, meta_info, SimpleNamespace(obj=SimpleNamespace(sampling_params=params)))
            assert "crossfill" not in meta_info
        if conflict:
            raise HTTPException(409, "refused")
        return "answer"

    serving = SimpleNamespace(create_error_response=lambda *error: error)
    return await hooks.around_answer(answer, serving, adapted, None, raw), raw.scope


async def header_of(scope):
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body"})

    async def send(message):
        sent.append(message)

    await ReuseHeader(app)(scope, None, send)
    assert sent[1] == {"type": "http.response.body"}
    return dict(sent[0]["headers"]).get(HEADER.encode())


@pytest.mark.parametrize(
    ("rid", "mode"), [("r", "allow"), (["r", "r2"], "allow"), ("r", None)], ids=["one", "several", "without a router"]
)
async def test_what_the_scheduler_said_is_a_header_once(rid, mode):
    hooks = AnswerHooks()
    answer, scope = await answered(hooks, mode, rid=rid)
    assert answer == "answer"
    assert await header_of(scope) == b"guided; blocks=1/2"
    assert hooks._outcomes == {}
    assert await header_of({}) is None


async def test_a_stream_that_required_reuse_and_was_refused_is_a_conflict():
    hooks = AnswerHooks()
    refused = {"outcome": "none; reason=too_short; refused=yes"}
    message, kind, status = (await answered(hooks, "require", **refused))[0]
    assert (kind, int(status)) == ("ReuseRefused", 409)
    assert message.endswith(": too_short")
    approximate = "fallback; reason=too_dense; prefix_hops=1; refused=yes"
    assert (await answered(hooks, "require", outcome=approximate))[0][0].endswith(": too_dense")
    # Who allows reuse is not refused, nor who found the prompt in the worker's own cache.
    assert (await answered(hooks, "allow", **refused))[0] == "answer"
    assert (await answered(hooks, "require"))[0] == "answer"
    assert (await answered(hooks, "require", outcome="none; reason=cached"))[0] == "answer"


async def test_an_answer_in_one_piece_that_is_refused_is_the_same_conflict():
    told, scope = await answered(AnswerHooks(), "require", stream=False, conflict=True)
    assert (told[0], told[1], int(told[2])) == ("refused", "ReuseRefused", 409)
    assert await header_of(scope) is not None


def test_outcomes_that_nobody_asks_for_are_forgotten(monkeypatch):
    monkeypatch.setattr("engines.hooks._MOST_OUTCOMES", 2)
    hooks = AnswerHooks()
    for name in "abc":
        state = SimpleNamespace(obj=SimpleNamespace(sampling_params={}))
        hooks.after_meta_info(None, None, {"id": name, "crossfill": ["none"]}, state)
    assert list(hooks._outcomes) == ["b", "c"]
