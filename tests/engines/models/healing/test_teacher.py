from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engines.models.healing import teacher
from engines.models.healing.dataset import every_token
from engines.models.healing.teacher import TeacherStates

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engines.models.loading import LoadedModel

ROWS = every_token(np.arange(1000, 1048, dtype=np.uint16).reshape(4, 12))


def fresh(whole: LoadedModel, rows: list[int]) -> torch.Tensor:
    with torch.no_grad():
        output = whole.model.model(torch.from_numpy(ROWS.ids[rows].astype("int64")), use_cache=False)
    states: torch.Tensor = output.last_hidden_state.reshape(-1, 64)
    return states


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The first tokens of the rows of every run of the teacher."""
    seen: list[list[int]] = []
    real = teacher.final_states

    def noted(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids[:, 0].tolist())
        return real(loaded, ids)

    monkeypatch.setattr(teacher, "final_states", noted)
    return seen


def test_states_are_those_of_the_whole_model(whole: LoadedModel, tmp_path: Path) -> None:
    found = TeacherStates(whole, "text", ROWS, tmp_path)[[2, 0]]
    assert (found.shape, found.dtype) == ((24, 64), torch.bfloat16)
    # What bfloat16 rounds.
    torch.testing.assert_close(found.float(), fresh(whole, [2, 0]), rtol=0.01, atol=1e-3)
    assert not torch.allclose(found.float(), fresh(whole, [0, 2]), rtol=0.1)


def test_a_row_is_computed_once(whole: LoadedModel, tmp_path: Path, runs: list[list[int]]) -> None:
    states = TeacherStates(whole, "text", ROWS, tmp_path)
    first = states[[0, 2]]
    assert torch.equal(states[[0, 2]], first)
    assert runs == [[1000, 1024]]
    # Of rows that are partly there the others.
    mixed = states[[3, 2, 1]]
    assert runs == [[1000, 1024], [1036, 1012]]
    torch.testing.assert_close(mixed.float(), fresh(whole, [3, 2, 1]), rtol=0.01, atol=1e-3)


def test_two_on_one_folder_share_rows(whole: LoadedModel, tmp_path: Path, runs: list[list[int]]) -> None:
    one, other = (TeacherStates(whole, "text", ROWS, tmp_path) for _ in range(2))
    first = one[[1]]
    assert torch.equal(other[[1]], first)
    assert torch.equal(TeacherStates(whole, "text", ROWS, tmp_path)[[1]], first)
    assert len(runs) == 1
    # The control: another kind of text has rows of its own.
    TeacherStates(whole, "other", ROWS, tmp_path)[[1]]
    assert len(runs) == 2


def test_row_that_failed_is_not_taken_for_there(
    whole: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_loaded: LoadedModel, _ids: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    states = TeacherStates(whole, "text", ROWS, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(teacher, "final_states", broken)
        with pytest.raises(MemoryError):
            states[[1]]
    torch.testing.assert_close(states[[1]].float(), fresh(whole, [1]), rtol=0.01, atol=1e-3)


def test_other_text_and_another_teacher_have_states_of_their_own(
    whole: LoadedModel, duplicate: Callable[[], LoadedModel], tmp_path: Path, runs: list[list[int]]
) -> None:
    TeacherStates(whole, "text", ROWS, tmp_path)[[0, 1]]
    longer = every_token(np.arange(2000, 2072, dtype=np.uint16).reshape(6, 12))
    TeacherStates(whole, "text", longer, tmp_path)[[0, 1]]
    assert runs == [[1000, 1012], [2000, 2012]]
    other = duplicate()
    with torch.no_grad():
        other.layers[-1].mlp.down_proj.weight.mul_(2)
    TeacherStates(other, "text", ROWS, tmp_path)[[0]]
    assert len(runs) == 3
    # The control: the first text's are still there.
    TeacherStates(whole, "text", ROWS, tmp_path)[[0, 1]]
    assert len(runs) == 3
