"""What callers may give: told at the edge, so that only what comes from files or a server is called damage."""

from cache_store.backends.protocol import AnchorPool, ScopeInfo

MOST_TTL_S = 10 * 365.25 * 86_400
"""Ten years: longest lease that ends by time."""


def check_ttl(ttl_s: float | None) -> None:
    """Raises ValueError unless it is None, or 0 to ten years."""
    # False for NaN too.
    if ttl_s is not None and not 0 <= ttl_s <= MOST_TTL_S:
        message = f"a lease lasts 0 to {MOST_TTL_S:.0f} seconds, or with None until it is released; not {ttl_s:g}"
        raise ValueError(message)


def check_text(name: str, value: str) -> None:
    """Raises ValueError unless the value can be written as UTF-8; `name` says what it is."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is no text: {value!r} holds half of a surrogate pair") from None


def check_info(info: ScopeInfo) -> None:
    """Raises ValueError for names that are no text."""
    check_text("tenant", info.tenant)
    check_text("model", info.model)
    check_text("revision", info.revision)


def check_pool(pool: AnchorPool, *identities: str) -> None:
    """Raises ValueError for names and identities that are no text."""
    check_info(pool.info)
    check_text("slot", pool.slot)
    for identity in identities:
        check_text("identity", identity)
