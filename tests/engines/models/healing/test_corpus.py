from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from engines.models import texts
from engines.models.healing import corpus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OWN = " ".join(f"Sentence {number} of this text says nothing that any other text would say." for number in range(12))
HELDOUT = texts.prose(texts.Part.HELDOUT).split()
METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: 1.0

{description}
"""


@pytest.fixture
def describe(library: Path) -> Callable[[str, str], None]:
    """Installs a distribution of that name and description."""

    def install(name: str, description: str) -> None:
        folder = library.parent / "site" / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(METADATA.format(name=name, description=description))

    return install


def module(folder: Path, name: str, *docstrings: str) -> None:
    first, *others = docstrings
    functions = "".join(f'\n\ndef f{n}():\n    """{text}"""\n' for n, text in enumerate(others))
    (folder / f"{name}.py").write_text(f'"""{first}"""\n{functions}')


def test_documents_are_descriptions_and_docstrings(library: Path, describe: Callable[[str, str], None]) -> None:
    module(library, "one", f"First. {OWN}", "Of a function.")
    describe("two", f"Second. {OWN}")
    assert set(corpus.documents(0)) == {f"First. {OWN}\n\nOf a function.", f"Second. {OWN}"}


def test_a_seed_gives_one_order_and_another_seed_another(library: Path) -> None:
    for number in range(8):
        module(library, f"m{number}", f"{number}. {OWN}")
    one, again, other = (corpus.documents(seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert sorted(one) == sorted(other)
    assert len(one) == 8


@pytest.mark.parametrize(("shared", "kept"), [(11, True), (12, False)])
def test_document_that_shares_twelve_words_in_a_row_with_held_out_prose_is_left_out(
    library: Path, shared: int, kept: bool
) -> None:
    # In other case and between other words, as a quotation would stand.
    run = " ".join(HELDOUT[100 : 100 + 2 * shared])
    words = re.findall(r"\w+", run)[:shared]
    text = f"{OWN} {' '.join(words).upper()} {OWN}"
    module(library, "one", text)
    assert (text in corpus.documents(0)) == kept


def test_copies_of_a_document_count_once(library: Path) -> None:
    module(library, "one", OWN)
    module(library, "two", OWN)
    assert corpus.documents(0).count(OWN) == 1


def test_badges_are_dropped_from_descriptions(library: Path, describe: Callable[[str, str], None]) -> None:
    badges = [
        "[![PyPI](https://img.example/pypi.svg)](https://pypi.example)",
        "![logo](logo.png)",
        ".. image:: https://img.example/build.svg",
        '   <img src="logo.png">',
        "https://docs.example/",
    ]
    inline = "See https://docs.example/ for more."
    describe("one", "\n".join([*badges, OWN, inline]))
    assert f"{OWN}\n{inline}" in corpus.documents(0)


def test_short_texts_are_left_out_and_long_ones_cut(library: Path, describe: Callable[[str, str], None]) -> None:
    describe("short", "x" * 299)
    describe("enough", "y" * 300)
    describe("long", "z" * 7000)
    assert set(corpus.documents(0)) == {"y" * 300, "z" * 6000}


def test_tests_and_files_that_do_not_parse_are_left_out(library: Path) -> None:
    (library / "test").mkdir()
    module(library / "test", "one", f"First. {OWN}")
    (library / "two.py").write_text(f'"""Second. {OWN}"""\nprint "old"\n')
    (library / "three.py").write_bytes(b'"""\xff"""')
    module(library, "four", f"Fourth. {OWN}")
    assert corpus.documents(0) == [f"Fourth. {OWN}"]
