"""The noise of a routing decision: normal values that are a fact of the request id, on any machine, in any version."""

from __future__ import annotations

import hashlib
from statistics import NormalDist

_UNIFORM_BITS = 52
_PER_DIGEST = 2


def standard_normals(request_id: str, count: int = 2) -> tuple[float, ...]:
    """`count` independent N(0, 1) values that depend on nothing but `request_id`; more of them begin with the same."""
    digests = -(-count // _PER_DIGEST)
    values = [value for block in range(digests) for value in _pair(request_id, block)]
    return tuple(values[:count])


def _pair(request_id: str, block: int) -> tuple[float, float]:
    digest = hashlib.blake2b(
        request_id.encode(), digest_size=16, person=b"crossfill-noise", salt=block.to_bytes(8, "big")
    ).digest()
    words = (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))
    # The half keeps both ends, where the inverse is infinite, out of reach.
    uniforms = [((word >> (64 - _UNIFORM_BITS)) + 0.5) / 2**_UNIFORM_BITS for word in words]
    normal = NormalDist()
    return normal.inv_cdf(uniforms[0]), normal.inv_cdf(uniforms[1])
