from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sessions.prompt import BLOCK_BYTES, Prompt, read_prompt

LONG = "The quick brown fox jumps over the lazy dog. " * 40


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def prompt_of(*messages: dict[str, Any], namespace: bytes = b"ns", **fields: Any) -> Prompt:
    return read_prompt({"model": "auto", "messages": list(messages), **fields}, namespace)


def shared_blocks(one: Prompt, other: Prompt) -> int:
    pairs = list(zip(one.blocks, other.blocks, strict=False))
    return next((index for index, (left, right) in enumerate(pairs) if left != right), len(pairs))


def test_a_later_turn_begins_with_all_blocks_of_the_turn_before() -> None:
    turns = [message("system", LONG), message("user", "first " + LONG)]
    one = prompt_of(*turns)
    two = prompt_of(*turns, message("assistant", "fixed"), message("user", "second"))
    assert len(one.blocks) == one.size_bytes // BLOCK_BYTES > 10
    assert two.blocks[: len(one.blocks)] == one.blocks
    assert two.earlier == (one.turn,)
    assert two.turn != one.turn


def test_a_match_never_passes_the_last_block_that_is_shared() -> None:
    # The texts differ in one byte, somewhere within a block: that block is no match, nor is any behind it.
    for position in (0, 255, 256, 300, 900):
        text = LONG[:position] + "#" + LONG[position + 1 :]
        one, two = prompt_of(message("user", LONG)), prompt_of(message("user", text))
        frame_start = len(b'{}\n"user"{"content":"')
        assert shared_blocks(one, two) == (frame_start + position) // BLOCK_BYTES
        assert not set(one.blocks[shared_blocks(one, two) :]) & set(two.blocks)


@pytest.mark.parametrize("big", [False, True], ids=["url", "inline"])
def test_requests_that_differ_only_in_the_image_share_nothing_behind_it(big: bool) -> None:
    def with_image(name: str) -> Prompt:
        url = f"data:image/png;base64,{name * 400_000}" if big else f"https://pictures/{name}"
        parts = [
            {"type": "text", "text": "before " + LONG},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "after " + LONG},
        ]
        return prompt_of(message("user", parts), message("user", LONG))

    cat, dog = with_image("c"), with_image("d")
    before = len(("before " + LONG).encode()) // BLOCK_BYTES
    assert before <= shared_blocks(cat, dog) <= before + 1
    assert cat.turn != dog.turn
    assert shared_blocks(cat, with_image("c")) == len(cat.blocks)
    # Bytes of a picture are not tokens.
    assert cat.size_bytes < 4 * len(LONG)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [message("developer", LONG)]},
        {"messages": [message("system", LONG, name="someone")]},
        {"messages": [message("system", None, tool_calls=[{"id": "1"}])]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=["role", "name", "tool-calls", "tools", "template"],
)
def test_what_a_template_writes_is_part_of_the_prompt(change: dict[str, Any]) -> None:
    base = {"messages": [message("system", LONG)]}
    tail = [message("user", LONG)]
    one = prompt_of(*base["messages"], *tail)
    fields = {"messages": base["messages"], **change}
    other = prompt_of(*fields.pop("messages"), *tail, **fields)
    assert not set(one.blocks[8:]) & set(other.blocks)
    assert one.turn != other.turn


@pytest.mark.parametrize(
    "change", [{"temperature": 0.5}, {"stream": True}, {"max_tokens": 3}, {"user": "u"}, {"tools": None}]
)
def test_what_no_template_writes_is_not(change: dict[str, Any]) -> None:
    assert prompt_of(message("user", LONG), **change) == prompt_of(message("user", LONG))


def test_tools_that_tool_choice_hides_are_not_in_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    bare = prompt_of(message("user", LONG))
    assert prompt_of(message("user", LONG), tools=tools, tool_choice="none") == bare
    assert prompt_of(message("user", LONG), tools=tools, tool_choice="auto") != bare


def test_null_fields_and_the_order_of_keys_do_not_matter() -> None:
    one = prompt_of({"role": "user", "content": LONG, "name": None})
    assert prompt_of({"content": LONG, "role": "user"}) == one


def test_namespaces_share_nothing() -> None:
    turns = (message("system", LONG), message("user", LONG), message("assistant", "a"), message("user", "b"))
    one, other = prompt_of(*turns), prompt_of(*turns, namespace=b"other")
    assert not set(one.blocks) & set(other.blocks)
    assert not {one.turn, *one.earlier} & {other.turn, *other.earlier}


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=8)), min_size=1))
def test_messages_cannot_run_into_each_other(turns: list[tuple[str, str]]) -> None:
    split = [*turns, ("user", "end")]
    joined = [*turns[:-1], (turns[-1][0], turns[-1][1] + 'end"}\n"user"{"content":"end')]
    one = prompt_of(*(message(role, text) for role, text in split))
    other = prompt_of(*(message(role, text) for role, text in joined))
    assert one.turn != other.turn


def test_only_user_turns_that_were_answered_are_earlier_turns() -> None:
    u1, u2, answer = message("user", "1"), message("user", "2"), message("assistant", "a")
    call = message("assistant", None, tool_calls=[{"id": "x"}])
    result = message("tool", "42", tool_call_id="x")
    assert prompt_of(u1).earlier == ()
    assert prompt_of(u1, u2).earlier == ()
    assert prompt_of(u1, call, result).earlier == (prompt_of(u1).turn,)
    assert prompt_of(u1, call, result).turn == prompt_of(u1).turn
    assert prompt_of(u1, answer, u2).earlier == (prompt_of(u1).turn,)
    assert prompt_of(message("system", "s")).turn is None


def test_latest_earlier_turns_come_first_and_are_bounded() -> None:
    talk: list[dict[str, Any]] = []
    turns = []
    for number in range(50):
        talk.append(message("user", f"question {number}"))
        turns.append(prompt_of(*talk).turn)
        talk.append(message("assistant", f"answer {number}"))
    earlier = prompt_of(*talk).earlier
    assert earlier == tuple(reversed(turns))[: len(earlier)]
    assert 20 <= len(earlier) < 50


@pytest.mark.parametrize("prompt", ["x" * 10_000, ["x" * 5_000, "y" * 5_000], list(range(10_000))])
def test_prompts_of_text_completions_share_their_beginning(prompt: Any) -> None:
    more = prompt + type(prompt)([prompt[-1]] if isinstance(prompt, list) else "z")
    one, longer = (read_prompt({"prompt": each}, b"ns", is_chat=False) for each in (prompt, more))
    assert shared_blocks(one, longer) >= len(one.blocks) - 1 > 30
    assert (one.turn, one.earlier) == (None, ())


def test_a_field_of_the_other_endpoint_is_no_part_of_the_prompt() -> None:
    assert read_prompt({"prompt": "x" * 999, "messages": 5}, b"ns", is_chat=False) == read_prompt(
        {"prompt": "x" * 999}, b"ns", is_chat=False
    )
    assert prompt_of(message("user", "x" * 999), prompt=5) == prompt_of(message("user", "x" * 999))


def test_work_is_bounded() -> None:
    huge = prompt_of(message("user", "x" * 3_000_000), message("assistant", "y"), message("user", "z"))
    assert len(huge.blocks) == 4096
    assert huge.size_bytes == 4096 * BLOCK_BYTES
    assert (huge.turn, huge.earlier) == (None, ())
    assert len(prompt_of(*[message("user", "x")] * 60_000).blocks) == 4096


def test_tokens_are_estimated_behind_a_match() -> None:
    prompt = prompt_of(message("user", "x" * 2_000))
    assert prompt.tokens_behind(0) == prompt.size_bytes / 4
    assert prompt.tokens_behind(2) == (prompt.size_bytes - 512) / 4
    assert Prompt().tokens_behind(1) == 0


def test_the_same_words_by_another_role_share_nothing() -> None:
    assert shared_blocks(prompt_of(message("system", LONG)), prompt_of(message("user", LONG))) == 0
    assert shared_blocks(prompt_of(message("user", LONG)), prompt_of(message("user", LONG))) > 5
