"""Namespaces: who shares state, and who never does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store import namespace
from cache_store.namespace import Namespace

BASE = Namespace("acme", "small", "r1", "tok", "tpl")
text = st.text(max_size=6)
namespaces = st.builds(Namespace, text, text, text, text, text, text)


def test_a_scope_is_the_same_on_every_machine() -> None:
    assert BASE.scope.hex() == "e6d299cd31ce2b62d2445dea38eb04f5"
    assert Namespace("ä", "", "", "", "", "s").scope.hex() == "f31d14e5e91ae2e1528dc3e6e555a811"


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_scopes_and_keys_do_not_depend_on_the_seed_of_pythons_hashes(seed: str) -> None:
    program = (
        "from cache_store.keys import page_keys; from cache_store.namespace import Namespace\n"
        "scope = Namespace('acme', 'small', 'r1', 'tok', 'tpl').scope\n"
        "print(scope.hex(), page_keys(scope, range(130))[1].key.hex())"
    )
    said = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
    )
    assert said.split() == ["e6d299cd31ce2b62d2445dea38eb04f5", "106c31f0779d8906c1b348a28db7620a"]


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_every_field_makes_another_scope(field: str) -> None:
    other = replace(BASE, **{field: "other"})
    assert other.scope != BASE.scope
    assert len(other.scope) == 16


def test_another_version_of_the_format_makes_another_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    before = BASE.scope
    monkeypatch.setattr(namespace, "FORMAT_VERSION", namespace.FORMAT_VERSION + 1)
    assert replace(BASE).scope != before


@pytest.mark.parametrize("one", [field.name for field in fields(Namespace)])
@pytest.mark.parametrize("other", [field.name for field in fields(Namespace)])
def test_a_value_of_one_field_does_not_stand_for_the_same_value_of_another(one: str, other: str) -> None:
    empty = Namespace("", "", "", "", "")
    assert (replace(empty, **{one: "x"}).scope == replace(empty, **{other: "x"}).scope) == (one == other)


def test_values_cannot_be_moved_across_the_border_of_two_fields() -> None:
    assert Namespace("ab", "c", "", "", "").scope != Namespace("a", "bc", "", "", "").scope
    assert Namespace("a", "", "", "", "", "b").scope != Namespace("ab", "", "", "", "").scope
    # Text that looks like the framing of the next field.
    framed = "\0" * 7 + "\5model" + "\0" * 7 + "\1m"
    assert Namespace("a" + framed, "", "", "", "").scope != Namespace("a", "m", "", "", "").scope


@given(namespaces, namespaces)
def test_scopes_are_equal_only_if_all_fields_are(one: Namespace, other: Namespace) -> None:
    assert (one.scope == other.scope) == (one == other)


def test_half_a_surrogate_pair_in_a_salt_is_a_salt_like_others():
    assert len({replace(BASE, salt=salt).scope for salt in ("\ud800", "\ud801", "?", "")}) == 4
