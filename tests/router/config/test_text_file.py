from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from router.config.text_file import read_bounded
from router.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "text"


def test_text_comes_back_as_it_is_up_to_the_bound(path: Path) -> None:
    path.write_bytes("a\r\né".encode())
    assert read_bounded(path, 5) == "a\r\né"


def test_a_larger_file_is_told_as_that_even_if_the_bound_cuts_a_character(path: Path) -> None:
    path.write_text("aé€", encoding="utf-8")
    for limit_bytes in range(6):
        with pytest.raises(ConfigError) as caught:
            read_bounded(path, limit_bytes)
        assert str(caught.value) == f"{path}: is larger than {limit_bytes} bytes"


def test_what_would_have_to_be_waited_for_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ConfigError) as caught:
        read_bounded(path, 5)
    assert str(caught.value) == f"{path}: cannot be read: it is not a regular file"


def test_a_link_to_a_file_is_read(path: Path) -> None:
    path.write_text("a")
    link = path.with_name("link")
    link.symlink_to(path)
    assert read_bounded(link, 5) == "a"


def test_what_is_no_text_or_no_file_is_one_line(path: Path) -> None:
    with pytest.raises(ConfigError, match="text: cannot be read: No such file or directory"):
        read_bounded(path, 5)
    path.write_bytes(b"a\xff")
    with pytest.raises(ConfigError, match="text: cannot be read: it is not UTF-8 text"):
        read_bounded(path, 5)
