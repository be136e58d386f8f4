"""The namespace of cached state that a request may share: what the router sets as `extra_key` on the worker request."""

from __future__ import annotations

import hashlib

from router.request.options import Reuse

LOCAL_TENANT = "local"


def extra_key(tenant: str, cache_salt: str | None = None, reuse: Reuse = Reuse.ALLOW) -> str:
    """Hex BLAKE2b-128 over typed, length-framed fields.

    The tenant comes from the router, never from the body, so a client's salt can only narrow its own namespace. KV that
    was made under reuse is approximate: a request without reuse lives apart from those that allow it, and is exact.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"crossfill-ns")
    fields = [("tenant", tenant)]
    if cache_salt:
        fields.append(("salt", cache_salt))
    if reuse is Reuse.OFF:
        fields.append(("reuse", "exact"))
    for name, value in fields:
        for part in (name.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()
