from __future__ import annotations

from typing import Any

from router.sessions.pins import PinEvent, Pins
from router.sessions.prompt import Prompt, read_prompt


def talk(*texts: str, namespace: bytes = b"ns", session: str | None = None) -> Prompt:
    """A conversation whose turns are alternately the user's and the assistant's."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)
    ]
    return read_prompt({"messages": messages}, namespace, session)


def test_a_later_turn_finds_the_model_of_the_turn_before() -> None:
    pins = Pins(10)
    assert pins.model_of(talk("hi", "hello", "and?")) is None
    assert pins.answered(talk("hi"), "large") is PinEvent.NEW
    assert pins.model_of(talk("hi", "hello", "and?")) == "large"


def test_a_first_turn_that_somebody_else_began_with_is_no_conversation() -> None:
    pins = Pins(10)
    pins.answered(talk("hi"), "large")
    assert pins.model_of(talk("hi")) is None


def test_conversations_that_begin_alike_part_as_soon_as_they_differ() -> None:
    pins = Pins(10)
    pins.answered(talk("hi"), "small")
    pins.answered(talk("hi", "hello", "one"), "large")
    pins.answered(talk("hi", "hello", "two"), "small")
    assert pins.model_of(talk("hi", "hello", "one", "1", "more")) == "large"
    assert pins.model_of(talk("hi", "hello", "two", "2", "more")) == "small"
    assert pins.model_of(talk("hi", "hello", "three")) == "small"
    # Other words at the very first turn: another conversation.
    assert pins.model_of(talk("ho", "hello", "one", "1", "more")) is None


def test_a_pin_moves_with_the_answer() -> None:
    pins = Pins(10)
    pins.answered(talk("hi"), "large")
    assert pins.answered(talk("hi", "a", "b"), "large") is PinEvent.KEPT
    assert pins.answered(talk("hi", "a", "b", "c", "d"), "small") is PinEvent.MOVED
    assert pins.model_of(talk("hi", "a", "b", "c", "d", "e", "f")) == "small"


def test_the_clients_own_name_of_a_conversation_counts_more_than_its_text() -> None:
    pins = Pins(10)
    assert pins.answered(talk("hi", session="s1"), "large") is PinEvent.NEW
    assert pins.model_of(talk("something else", session="s1")) == "large"
    assert pins.model_of(talk("hi", "a", "b", session="s2")) is None
    assert pins.model_of(talk("hi", "a", "b")) is None


def test_tenants_never_see_each_others_pins() -> None:
    pins = Pins(10)
    pins.answered(talk("hi", namespace=b"one"), "large")
    pins.answered(talk("hi", namespace=b"one", session="s"), "large")
    assert pins.model_of(talk("hi", "a", "b", namespace=b"two")) is None
    assert pins.model_of(talk("hi", namespace=b"two", session="s")) is None


def test_the_least_recently_answered_conversation_is_forgotten_first() -> None:
    pins = Pins(2)
    for text in ("one", "two", "one", "three"):
        pins.answered(talk(text), "large")
    assert len(pins) == 2
    assert [pins.model_of(talk(text, "a", "b")) for text in ("one", "two", "three")] == ["large", None, "large"]


def test_a_text_without_turns_is_pinned_only_under_a_name() -> None:
    pins = Pins(10)
    assert pins.answered(read_prompt({"prompt": "text"}, b"ns", is_chat=False), "large") is None
    assert pins.answered(read_prompt({"prompt": "text"}, b"ns", "s", is_chat=False), "large") is PinEvent.NEW
    assert len(pins) == 1
