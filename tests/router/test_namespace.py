from hypothesis import given
from hypothesis import strategies as st

from router.namespace import extra_key


def test_fields_are_framed() -> None:
    assert extra_key("a", "bc") != extra_key("ab", "c")
    assert extra_key("a") != extra_key("", "a")


def test_key_is_a_fact_of_its_fields() -> None:
    # Pinned: workers keep state under this key across restarts and versions of the router.
    assert extra_key("local") == "2dd277c74413c6dce056642bb8a4f7dc"


def test_empty_salt_is_no_salt() -> None:
    assert extra_key("local", "") == extra_key("local", None) == extra_key("local")


@given(st.text(), st.text(), st.text(), st.text())
def test_a_client_cannot_pick_anothers_namespace(tenant: str, salt: str, other: str, other_salt: str) -> None:
    if tenant != other:
        assert extra_key(tenant, salt) != extra_key(other, other_salt)
    elif salt != other_salt:
        assert extra_key(tenant, salt) != extra_key(tenant, other_salt)
