"""Shadow prefills are asked for one after the other, when nobody else is served, and harm nobody."""

import asyncio
from types import SimpleNamespace

import pytest

from engines.shadow_requests import ShadowRequests

WORD = {"reuse": "allow", "tenant": "acme", "salt": "s", "call": "c"}


class Manager:
    """SGLang's, of which requests are noted."""

    def __init__(self, *, busy=False, fails=False):
        self.rid_to_state = {"another": object()} if busy else {}
        self.asked, self.at_once, self._fails = [], 0, fails

    async def generate_request(self, request, raw):
        assert raw is None
        self.asked.append(request)
        self.rid_to_state[request.rid] = object()
        self.at_once = max(self.at_once, len(self.rid_to_state))
        await asyncio.sleep(0.01)
        del self.rid_to_state[request.rid]
        if self._fails:
            raise RuntimeError("broken")
        yield {}


def request(rid="r", **more):
    return SimpleNamespace(**{"rid": rid, "text": None, "input_ids": [1, 2, 3], "extra_key": "tenant=acme", **more})


async def settle(requests):
    await asyncio.gather(*requests._tasks)


@pytest.fixture
def requests():
    return ShadowRequests(look_every_s=0.01, patience_s=0.2)


async def test_a_shadow_is_the_same_prompt_exact_and_apart(requests):
    requests.ask(manager := Manager(), request(), WORD)
    await settle(requests)
    [shadow] = manager.asked
    assert (shadow.rid, shadow.input_ids, shadow.extra_key) == ("shadow-r", [1, 2, 3], "shadow tenant=acme")
    assert shadow.sampling_params["max_new_tokens"] == 1
    said = shadow.sampling_params["custom_params"]["crossfill"]
    assert said == {**WORD, "reuse": "off", "shadow_of": "r"}


async def test_prompts_that_came_as_text_go_as_text(requests):
    requests.ask(manager := Manager(), request(text="words", input_ids=None), WORD)
    await settle(requests)
    assert manager.asked[0].text == "words"


async def test_shadows_come_one_after_the_other(requests):
    manager = Manager()
    for number in range(5):
        requests.ask(manager, request(str(number)), WORD)
    await settle(requests)
    assert [one.rid for one in manager.asked] == [f"shadow-{number}" for number in range(5)]
    assert manager.at_once == 1


async def test_others_come_first_and_patience_ends(requests):
    manager = Manager(busy=True)
    requests.ask(manager, request("waits"), WORD)
    await asyncio.sleep(0.05)
    assert manager.asked == []
    manager.rid_to_state.clear()
    await settle(requests)
    assert len(manager.asked) == 1
    manager.rid_to_state["another"] = object()
    requests.ask(manager, request("in vain"), WORD)
    await settle(requests)
    assert len(manager.asked) == 1


async def test_no_more_wait_than_are_kept(requests):
    manager = Manager(busy=True)
    for number in range(40):
        requests.ask(manager, request(str(number)), WORD)
    assert len(requests._tasks) == 16
    manager.rid_to_state.clear()
    await settle(requests)


async def test_several_prompts_or_choices_have_none(requests):
    requests.ask(manager := Manager(), request(["r1", "r2"]), WORD)
    await settle(requests)
    assert manager.asked == []


async def test_one_that_fails_is_said_and_the_next_goes_on(requests, caplog):
    requests.ask(broken := Manager(fails=True), request("a"), WORD)
    requests.ask(whole := Manager(), request("b"), WORD)
    await settle(requests)
    assert len(broken.asked) == len(whole.asked) == 1
    assert "a shadow prefill failed" in caplog.text
