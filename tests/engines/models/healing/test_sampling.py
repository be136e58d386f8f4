from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engines.models.healing import sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from engines.models.loading import LoadedModel

LENGTH = 80
SPEAKERS = ["\n<|im_start|>user\n", "\n<|im_start|>assistant\n"]


@pytest.fixture
def talker(duplicate: Callable[[], LoadedModel]) -> LoadedModel:
    """A random model that ends a turn after some ten tokens."""
    loaded = duplicate()
    bias = torch.zeros(loaded.model.config.vocab_size)
    # Against 64 others of about 1.
    bias[loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")] = 3.0
    loaded.model.lm_head.bias = torch.nn.Parameter(bias)
    return loaded


def opening(tokenizer: Any) -> list[int]:
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": "X"}], tokenize=False)
    ids: list[int] = tokenizer(text.partition("X")[0], add_special_tokens=False)["input_ids"]
    return ids


def test_rows_have_the_shape_asked_for_and_begin_as_the_template_does(talker: LoadedModel) -> None:
    rows = sampling.converse(talker, 3, seed=1, length=LENGTH)
    assert (rows.shape, rows.dtype) == ((3, LENGTH), np.uint16)
    begin = opening(talker.tokenizer)
    assert rows[:, : len(begin)].tolist() == [begin] * 3
    # What follows is the model's, and each row has its own.
    assert len({tuple(row) for row in rows.tolist()}) == 3


def test_after_each_turn_the_template_hands_over_to_the_other_speaker(talker: LoadedModel) -> None:
    rows = sampling.converse(talker, 4, seed=1, length=LENGTH)
    turns = 0
    for row in rows.tolist():
        # The first part is the system's turn.
        _, *parts = talker.tokenizer.decode(row).split("<|im_end|>")
        for number, part in enumerate(parts):
            speaker = SPEAKERS[number % 2]
            assert part.startswith(speaker) or (number == len(parts) - 1 and speaker.startswith(part))
            assert "<|im_start|>" not in part.removeprefix(speaker[: len(part)])
        turns += len(parts)
    # The control: there were turns of both speakers to look at.
    assert turns >= 4 * 3


def test_a_seed_gives_the_same_rows_and_another_seed_others(talker: LoadedModel) -> None:
    one, again, other = (sampling.converse(talker, 2, seed=seed, length=48) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert (one != other).any(1).all()


def test_rows_are_made_in_batches(talker: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int | None]] = []

    def note(_text: str, done: int, total: int | None) -> None:
        seen.append((done, total))

    monkeypatch.setattr(sampling, "BATCH_ROWS", 2)
    rows = sampling.converse(talker, 3, seed=1, length=36, progress=note)
    assert rows.shape == (3, 36)
    assert len({tuple(row) for row in rows.tolist()}) == 3
    assert seen == sorted(seen)
    assert seen[-1] == (3 * 36, 3 * 36)
    assert sampling.converse(talker, 0, seed=1, length=36).shape == (0, 36)


def test_tokens_come_from_the_most_likely_few(
    duplicate: Callable[[], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = duplicate()
    monkeypatch.setattr(sampling, "_TOP_K", 1)
    one, other = (sampling.converse(loaded, 1, seed=seed, length=40)[0].tolist() for seed in (1, 2))
    begin = len(opening(loaded.tokenizer))
    # Alone, one token at a time and without a cache: the most likely one each time.
    expected = one[:begin]
    with torch.inference_mode():
        while len(expected) < 40:
            logits = loaded.model(torch.tensor([expected]), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
    assert one == other == expected


def test_steering_puts_the_template_between_turns(whole: LoadedModel) -> None:
    tokenizer = whole.tokenizer
    turns = sampling._Turns(tokenizer, 2)
    to_assistant, to_user = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in reversed(SPEAKERS))
    # What a model would say is 7 throughout, apart from the end of a turn of the first row, twice.
    said = [turns.end, *[7] * len(to_assistant), 7, turns.end, *[7] * len(to_user), 7]
    rows = list(zip(*[turns.steer([token, 7]) for token in said], strict=True))
    assert list(rows[0]) == [turns.end, *to_assistant, 7, turns.end, *to_user, 7]
    assert list(rows[1]) == [7] * len(said)


def test_an_end_where_the_template_stands_is_no_end(whole: LoadedModel) -> None:
    turns = sampling._Turns(whole.tokenizer, 1)
    gap = whole.tokenizer(SPEAKERS[1], add_special_tokens=False)["input_ids"]
    found = [turns.steer([turns.end])[0] for _ in range(2 + len(gap))]
    assert found == [turns.end, *gap, turns.end]
