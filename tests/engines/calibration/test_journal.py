"""Results of steps that are found again, and those that must not be."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from engines.calibration.journal import Journal, digest_of
from engines.errors import CalibrationDataError


def once(value):
    """A step that says how often it was taken."""
    taken = []

    def find():
        taken.append(value)
        return {"found": np.asarray(value), "name with spaces": np.arange(3)}

    return find, taken


def test_a_result_is_found_again_by_what_it_follows_from(tmp_path):
    find, taken = once(5)
    first = Journal(tmp_path, ["models"])
    assert first.get("a step", {"tokens": [1, 2]}, find)["found"] == 5
    again = Journal(tmp_path, ["models"])
    found = again.get("a step", {"tokens": [1, 2]}, find)
    assert set(found) == {"found", "name with spaces"}
    assert found["found"] == 5
    assert len(taken) == 1
    assert (first.taken_over, again.taken_over) == (0, 1)
    assert again.seconds == first.seconds


@pytest.mark.parametrize(
    ("common", "step", "given"),
    [(["others"], "a step", [1]), (["models"], "another", [1]), (["models"], "a step", [2])],
)
def test_whatever_differs_is_made_anew(tmp_path, common, step, given):
    find, taken = once(5)
    Journal(tmp_path, ["models"]).get("a step", [1], find)
    Journal(tmp_path, common).get(step, given, find)
    assert len(taken) == 2


def test_without_a_folder_nothing_is_kept(tmp_path):
    find, taken = once(5)
    journal = Journal()
    journal.get("a step", [1], find)
    journal.get("a step", [1], find)
    assert len(taken) == 2
    assert journal.seconds["a step"] >= 0


def test_a_step_that_is_ended_within_is_taken_up_with_its_seconds(tmp_path):
    first = Journal(tmp_path)
    assert first.take_up("a step", [1]) is None
    first.leave("a step", [1], {"at": np.asarray(3)}, 20.0)
    first.leave("a step", [1], {"at": np.asarray(5)}, 40.0)
    again = Journal(tmp_path)
    assert again.take_up("a step", [2]) is None

    def find():
        return {"found": again.take_up("a step", [1])["at"]}

    assert again.get("a step", [1], find)["found"] == 5
    assert again.seconds["a step"] == pytest.approx(40, abs=5)
    last = Journal(tmp_path)
    assert last.get("a step", [1], find)["found"] == 5
    assert last.seconds == again.seconds


def test_what_a_full_disk_cuts_short_is_taken_away(tmp_path, monkeypatch):
    def cut_short(path, content):
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", cut_short)
    with pytest.raises(CalibrationDataError, match="No space left"):
        Journal(tmp_path).get("a step", [1], once(5)[0])
    assert list(tmp_path.iterdir()) == []


def test_what_claims_to_be_encrypted_is_made_anew(tmp_path):
    find, taken = once(5)
    Journal(tmp_path).get("a step", [1], find)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    for place in range(len(content)):
        if content.startswith(b"PK\x01\x02", place):
            content[place + 8] |= 1
    path.write_bytes(content)
    assert Journal(tmp_path).get("a step", [1], find)["found"] == 5
    assert len(taken) == 2


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 broken", b"\x80\x04}q\x00."])
def test_what_is_damaged_is_made_anew_and_said(tmp_path, caplog, damage):
    find, taken = once(5)
    Journal(tmp_path).get("a step", [1], find)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert Journal(tmp_path).get("a step", [1], find)["found"] == 5
    assert len(taken) == 2
    assert "is not usable" in caplog.text
    assert Journal(tmp_path).get("a step", [1], find)["found"] == 5
    assert len(taken) == 2


def test_objects_are_neither_written_nor_read(tmp_path):
    with pytest.raises(ValueError, match="allow_pickle"):
        Journal(tmp_path).get("a step", [1], lambda: {"found": np.array([{}], dtype=object)})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("in the way")
    find, _ = once(5)
    with pytest.raises(CalibrationDataError, match="cannot be written"):
        Journal(tmp_path / "file").get("a step", [1], find)


def test_digests_tell_matrices_and_layers_apart():
    one, two = np.eye(2), np.ones((2, 2))
    found = {digest_of({1: one}), digest_of({2: one}), digest_of({1: two}), digest_of({1: one.astype(np.float32)})}
    assert len(found) == 4
    assert digest_of({1: one, 2: two}) == digest_of({2: two, 1: one})
