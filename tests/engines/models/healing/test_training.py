from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engines.models import texts
from engines.models.errors import DivergedRunError, StaleRunError
from engines.models.healing import dataset
from engines.models.healing.loss import divergence
from engines.models.healing.plan import Plan, Stage, learning_rate, shares
from engines.models.healing.student import Student, make_student
from engines.models.healing.teacher import final_states
from engines.models.healing.training import Training, batches

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engines.models.healing.dataset import Rows
    from engines.models.loading import LoadedModel

TOKENS = 32
SHORT = Plan((Stage((1,), 3), Stage((1, 2), 3)), 4, 64, 16, 1e-2, warmup_steps=2, fade_steps=2)
LONG = Plan((Stage((1,), 40),), 16, 128, 24, 3e-3, warmup_steps=4, fade_steps=4, decay=0.5)


@pytest.fixture
def kinds(whole: LoadedModel) -> dict[str, Rows]:
    text = texts.prose(texts.Part.CALIBRATION)
    rows = dataset.pack(whole.tokenizer, [text[:2000]], TOKENS, 4 * TOKENS)
    return {"documents": rows, "long": dataset.pack(whole.tokenizer, [text[2000:4000]], 2 * TOKENS, 4 * TOKENS)}


@pytest.fixture
def begin(
    whole: LoadedModel, duplicate: Callable[[], LoadedModel], kinds: dict[str, Rows], tmp_path: Path
) -> Callable[[Plan, str], tuple[Student, Training]]:
    """A student that has learned nothing, and its training in a folder of that name."""

    def make(plan: Plan, name: str) -> tuple[Student, Training]:
        student = make_student(duplicate(), plan.rank, plan.seed)
        return student, Training(student, whole, kinds, plan, tmp_path / name)

    return make


def parameters(student: Student) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in student.trained().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@torch.inference_mode()
def judge(student: Student, whole: LoadedModel, rows: Rows) -> float:
    """Mean divergence from the whole model on all of `rows`, nats."""
    ids = torch.from_numpy(rows.ids.astype("int64"))
    states = (final_states(loaded, ids) for loaded in (student.loaded, whole))
    return divergence(*states, whole.model.lm_head.weight).mean().item()


def test_layers_fade_at_the_begin_of_the_stage_that_drops_them() -> None:
    plan = Plan((Stage((1,), 10), Stage((1, 3), 10)), fade_steps=4)
    assert [shares(plan, step)[1] for step in (0, 1, 2, 3, 4, 9, 10, 19)] == [0.75, 0.5, 0.25, 0, 0, 0, 0, 0]
    assert [shares(plan, step)[3] for step in (0, 3, 9, 10, 11, 13, 19)] == [1, 1, 1, 0.75, 0.5, 0, 0]
    assert shares(plan, 0).keys() == {1, 3}


def test_fade_that_a_stage_is_too_short_for_goes_on_in_the_next() -> None:
    plan = Plan((Stage((1,), 2), Stage((1, 3), 10)), fade_steps=4)
    assert [shares(plan, step) for step in (1, 2, 3, 5)] == [
        {1: 0.5, 3: 1.0},
        {1: 0.25, 3: 0.75},
        {1: 0.0, 3: 0.5},
        {1: 0.0, 3: 0.0},
    ]


def test_learning_rate_rises_stays_and_falls() -> None:
    plan = Plan((Stage((1,), 12), Stage((1, 3), 8)), learning_rate=2.0, warmup_steps=4, fade_steps=4, decay=0.3)
    found = [learning_rate(plan, step) for step in (0, 1, 3, 4, 13, 14, 17, 19)]
    assert found == pytest.approx([0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1 / 3])


def counted(made: list[tuple[str, list[int]]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for kind, rows in made:
        found.setdefault(kind, []).extend(rows)
    return {kind: sorted(rows) for kind, rows in found.items()}


def test_batches_have_every_row_once_before_any_comes_again() -> None:
    kinds = {
        "short": dataset.every_token(np.zeros((6, 4), np.uint16)),
        "long": dataset.every_token(np.zeros((3, 8), np.uint16)),
        # Longer than a batch.
        "longest": dataset.every_token(np.zeros((2, 16), np.uint16)),
    }
    made = batches(kinds, Plan((Stage((1,), 20),), batch_tokens=8, fade_steps=1))
    assert len(made) == 20
    everything = {"short": [0, 1, 2, 3, 4, 5], "long": [0, 1, 2], "longest": [0, 1]}
    first, second = made[:8], made[8:16]
    assert counted(first) == counted(second) == everything
    assert first != second
    assert {kind: len(rows) for kind, rows in made} == {"short": 2, "long": 1, "longest": 1}


def test_a_seed_gives_the_same_batches_and_another_seed_others() -> None:
    kinds = {"text": dataset.every_token(np.zeros((9, 4), np.uint16))}
    one, again, other = (
        batches(kinds, Plan((Stage((1,), 8),), batch_tokens=8, fade_steps=1, seed=seed)) for seed in (1, 1, 2)
    )
    assert one == again != other
    # A row that no batch was full with.
    assert len(counted(one[:4])["text"]) == 8


def test_text_that_fills_no_batch_is_refused() -> None:
    kinds = {"text": dataset.every_token(np.zeros((3, 4), np.uint16))}
    assert len(batches(kinds, Plan((Stage((1,), 2),), batch_tokens=12, fade_steps=1))) == 2
    with pytest.raises(ValueError, match="no kind of text fills a batch of 16 tokens"):
        batches(kinds, Plan((Stage((1,), 2),), batch_tokens=16, fade_steps=1))


def test_training_brings_the_student_back_to_the_whole_model(
    whole: LoadedModel,
    kinds: dict[str, Rows],
    begin: Callable[[Plan, str], tuple[Student, Training]],
    duplicate: Callable[[], LoadedModel],
) -> None:
    del kinds["long"]
    pruned = make_student(duplicate(), LONG.rank, LONG.seed)
    pruned.fade({1: 0.0})
    before = judge(pruned, whole, kinds["documents"])
    student, training = begin(LONG, "run")
    while not training.done:
        found = training.step()
    assert student.gone() == (1,)
    after = judge(student, whole, kinds["documents"])
    # 0.0256 nats and 0.0010 were measured.
    assert after < 0.1 * before
    # What the last step says of itself is of that size too.
    assert found.divergence.item() < 0.1 * before
    # The control: the same steps at a rate of nothing.
    student, training = begin(replace(LONG, stages=(Stage((1,), 4),), learning_rate=0.0), "idle")
    while not training.done:
        training.step()
    assert judge(student, whole, kinds["documents"]) == before


def test_interrupted_run_ends_as_one_that_was_not(begin: Callable[[Plan, str], tuple[Student, Training]]) -> None:
    student, training = begin(SHORT, "whole")
    while not training.done:
        training.step()
    expected = parameters(student)
    # Interrupted while the second stage fades, with steps made since that are lost.
    first, training = begin(SHORT, "parts")
    for step in range(5):
        if step == 4:
            training.save()
        training.step()
    second, training = begin(SHORT, "parts")
    assert training.steps_done == 4
    assert not equal(parameters(second), parameters(first))
    while not training.done:
        training.step()
    assert equal(parameters(second), expected)
    # The control: the steps before the interruption count.
    assert not equal(parameters(first), expected)


def test_finished_run_taken_up_again_has_its_layers_gone(
    begin: Callable[[Plan, str], tuple[Student, Training]],
) -> None:
    student, training = begin(SHORT, "run")
    while not training.done:
        training.step()
    training.save()
    again, training = begin(SHORT, "run")
    assert training.done
    assert again.gone() == student.gone() == (1, 2)
    assert equal(parameters(again), parameters(student))


def test_checkpoint_stays_whole_while_it_is_replaced(
    begin: Callable[[Plan, str], tuple[Student, Training]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    student, training = begin(SHORT, "run")
    training.step()
    training.save()
    kept = parameters(student)
    training.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.save()
    again, resumed = begin(SHORT, "run")
    assert resumed.steps_done == 1
    assert equal(parameters(again), kept)
    # The next one is written over what is left of the broken one.
    training.save()
    assert begin(SHORT, "run")[1].steps_done == 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint.pt"]


def test_run_by_another_plan_is_refused(begin: Callable[[Plan, str], tuple[Student, Training]], tmp_path: Path) -> None:
    _, training = begin(SHORT, "run")
    training.step()
    training.save()
    other = replace(SHORT, learning_rate=2e-2)
    with pytest.raises(StaleRunError, match="damaged or comes from another run; give another folder") as caught:
        begin(other, "run")
    assert caught.value.path == tmp_path / "run" / "checkpoint.pt"
    assert begin(other, "other")[1].steps_done == 0


def test_run_on_other_text_and_a_damaged_checkpoint_are_refused(
    whole: LoadedModel, begin: Callable[[Plan, str], tuple[Student, Training]], tmp_path: Path
) -> None:
    student, training = begin(SHORT, "run")
    training.save()
    other = {"other": dataset.every_token(np.arange(3000, 3128, dtype=np.uint16).reshape(4, 32))}
    with pytest.raises(StaleRunError):
        Training(student, whole, other, SHORT, tmp_path / "run")
    # The control: the same text goes on.
    begin(SHORT, "run")
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(StaleRunError):
        begin(SHORT, "run")


def test_loss_that_is_no_number_ends_the_run_before_an_update(
    begin: Callable[[Plan, str], tuple[Student, Training]],
) -> None:
    student, training = begin(SHORT, "run")
    with torch.no_grad():
        next(student.norms())[1].fill_(float("nan"))
    before = parameters(student)
    with pytest.raises(DivergedRunError, match="step 0"):
        training.step()
    assert training.steps_done == 0
    assert all(torch.equal(before[name], value) or value.isnan().all() for name, value in student.trained().items())


@pytest.mark.parametrize(
    "change",
    [
        {"stages": ()},
        {"stages": (Stage((1,), 0),)},
        {"stages": (Stage((1,), 5), Stage((2,), 5))},
        {"fade_steps": 4},
        {"fade_steps": 0},
        {"warmup_steps": 0},
        {"decay": 0.0},
        {"positions": 0},
    ],
    ids=str,
)
def test_plans_that_cannot_be_run_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        replace(SHORT, **change)
