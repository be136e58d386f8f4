from hypothesis import given
from hypothesis import strategies as st

from router.request.options import Reuse
from router.tenants.namespace import extra_key

reuses = st.sampled_from([Reuse.OFF, Reuse.ALLOW, Reuse.REQUIRE])


def test_fields_are_framed() -> None:
    assert extra_key("a", "bc") != extra_key("ab", "c")
    assert extra_key("a") != extra_key("", "a")


def test_key_is_a_fact_of_its_fields() -> None:
    # Pinned: workers keep state under this key across restarts and versions of the router.
    assert extra_key("local") == "2dd277c74413c6dce056642bb8a4f7dc"


def test_empty_salt_is_no_salt() -> None:
    assert extra_key("local", "") == extra_key("local", None) == extra_key("local")


def test_only_off_is_apart() -> None:
    assert extra_key("local", None, Reuse.REQUIRE) == extra_key("local", None, Reuse.ALLOW) == extra_key("local")
    assert extra_key("local", None, Reuse.OFF) not in {extra_key("local"), extra_key("local", "exact")}


@given(st.text(), st.text(), reuses, st.text(), st.text(), reuses)
def test_a_client_cannot_pick_anothers_namespace(
    tenant: str, salt: str, reuse: Reuse, other: str, other_salt: str, other_reuse: Reuse
) -> None:
    exact = (reuse is Reuse.OFF, other_reuse is Reuse.OFF)
    same = (tenant, salt, exact[0]) == (other, other_salt, exact[1])
    assert (extra_key(tenant, salt, reuse) == extra_key(other, other_salt, other_reuse)) == same
