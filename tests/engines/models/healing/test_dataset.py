from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engines.models.healing import dataset
from engines.models.healing.dataset import ANSWER_WEIGHT
from engines.models.healing.recall import Exercise, exercise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engines.models.loading import LoadedModel

DOCUMENTS = ["The first document has a few words.", "A second one.", "And a third, which is the longest of all three."]
FILLER = [f"Sentence number {number} is long enough, and tells nothing at all." for number in range(60)]
SEPARATOR = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(whole: LoadedModel) -> Any:
    return whole.tokenizer


@pytest.fixture(scope="module")
def made() -> list[Exercise]:
    return [exercise(random.Random(seed), FILLER[:6], facts=4, questions=3) for seed in range(12)]


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def answers_of(tokenizer: Any, ids: list[int], weights: list[int]) -> str:
    """The text of the tokens that positions of an answer's weight predict."""
    text: str = tokenizer.decode([ids[place + 1] for place, weight in enumerate(weights) if weight == ANSWER_WEIGHT])
    return text


def test_packed_rows_are_full_and_hold_the_documents_in_order(tokenizer: Any) -> None:
    expected = encode(tokenizer, "".join(text + SEPARATOR for text in DOCUMENTS))
    rows = dataset.pack(tokenizer, DOCUMENTS, 5, 1000)
    count = len(expected) // 5
    assert rows.ids.shape == (count, 5)
    assert rows.ids.reshape(-1).tolist() == expected[: 5 * count]
    assert expected.count(tokenizer.convert_tokens_to_ids(SEPARATOR)) == 3


def test_packing_reads_no_more_documents_than_it_needs(tokenizer: Any) -> None:
    def documents() -> Iterator[str]:
        yield from DOCUMENTS[:2]
        raise AssertionError("read too far")

    assert dataset.pack(tokenizer, documents(), 4, 10).ids.shape == (2, 4)
    with pytest.raises(AssertionError, match="read too far"):
        dataset.pack(tokenizer, documents(), 4, 1000)


def test_every_token_but_the_last_of_a_row_counts(tokenizer: Any) -> None:
    ids = np.arange(12, dtype=np.uint16).reshape(3, 4)
    for rows in (dataset.every_token(ids), dataset.pack(tokenizer, DOCUMENTS, 4, 12)):
        assert rows.weights.tolist() == [[1, 1, 1, 0]] * 3
    assert np.array_equal(dataset.every_token(ids).ids, ids)


def test_exercises_read_as_the_template_writes_them(tokenizer: Any, made: list[Exercise]) -> None:
    rows = dataset.exercises(tokenizer, made, 512)
    assert len(rows.ids) == len(made)
    for one, ids in zip(made, rows.ids.tolist(), strict=True):
        messages: list[dict[str, str]] = []
        for question, answer in one.turns:
            asked = question if messages else f"{one.context}\n\n{question}"
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        text, _, padding = tokenizer.decode(ids).partition(SEPARATOR)
        # Not left to pytest to compare: it takes minutes to show how lines of this length differ.
        same = text == tokenizer.apply_chat_template(messages, tokenize=False)
        assert same
        assert padding.replace(SEPARATOR, "") == ""


def test_weight_lies_on_the_positions_that_predict_the_answers(tokenizer: Any, made: list[Exercise]) -> None:
    rows = dataset.exercises(tokenizer, made, 512)
    for one, ids, weights in zip(made, rows.ids.tolist(), rows.weights.tolist(), strict=True):
        expected = "".join(f"{answer}<|im_end|>" for _, answer in one.turns)
        assert answers_of(tokenizer, ids, weights) == expected
        # The control: one position further is another text.
        assert answers_of(tokenizer, [*ids[1:], 0], weights) != expected


def test_other_positions_of_an_exercise_count_once_and_padding_never(tokenizer: Any, made: list[Exercise]) -> None:
    rows = dataset.exercises(tokenizer, made, 512)
    for ids, weights in zip(rows.ids.tolist(), rows.weights.tolist(), strict=True):
        used = ids.index(tokenizer.convert_tokens_to_ids(SEPARATOR))
        assert weights[used - 1 :] == [0] * (512 - used + 1)
        assert set(weights[: used - 1]) == {1, ANSWER_WEIGHT}


def test_exercises_that_do_not_fit_are_left_out(tokenizer: Any, made: list[Exercise]) -> None:
    whole = dataset.exercises(tokenizer, made, 512)
    lengths = (whole.ids != 0).sum(1)
    limit = int(np.median(lengths))
    fitting = lengths <= limit
    assert 0 < fitting.sum() < len(made)
    rows = dataset.exercises(tokenizer, made, limit)
    assert np.array_equal(rows.ids, whole.ids[fitting, :limit])
    assert np.array_equal(rows.weights, whole.weights[fitting, :limit])
    assert dataset.exercises(tokenizer, made, 10).ids.shape == (0, 10)


def test_sentences_are_split_and_those_of_odd_sizes_left_out() -> None:
    good = "This is a sentence of the usual length, or about it."
    text = f"Too short. {good}\nAnother one that is\nbroken over lines is joined. " + "X" * 301 + f". no capital {good}"
    assert dataset.sentences([text]) == [good, "Another one that is broken over lines is joined."]


def test_made_exercises_mostly_fit_and_fill_their_rows(tokenizer: Any) -> None:
    found = dataset.make_exercises(FILLER, 24, 512, seed=1)
    assert len(found) == 24
    rows = dataset.exercises(tokenizer, found, 512)
    assert len(rows.ids) > 18
    assert (rows.ids != 0).sum(1).mean() > 200


def test_a_seed_makes_one_list_of_exercises_and_another_seed_another() -> None:
    one, again, other = (dataset.make_exercises(FILLER, 5, 512, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len({made.context for made in one}) == 5
