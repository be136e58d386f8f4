"""Who may share stored state: the namespace that roots every key."""

import hashlib
from dataclasses import astuple, dataclass, fields
from functools import cached_property

FORMAT_VERSION = 2
"""Version of keys and records; another one is another namespace."""


@dataclass(frozen=True)
class Namespace:
    """State is shared within a namespace and never across.

    Every field is typed and length-framed in the scope, so no value of one can stand for another. None of them may be
    taken from a client's request, except that `salt` narrows what the tenant could see anyway.

    Attributes:
        tenant: authenticated identity, as the router derives it.
        model: served name of the model that computed the state.
        revision: digest of its weights.
        tokenizer: digest of its tokenizer.
        template: digest of its chat template.
        salt: further separation that the client asked for; empty for none.
    """

    tenant: str
    model: str
    revision: str
    tokenizer: str
    template: str
    salt: str = ""

    @cached_property
    def scope(self) -> bytes:
        """16 bytes that stand for the namespace and the format version, on every machine the same."""
        digest = hashlib.blake2b(digest_size=16, person=b"crossfill-scope")
        digest.update(FORMAT_VERSION.to_bytes(4, "big"))
        for field, value in zip(fields(self), astuple(self), strict=True):
            # Clients choose salts, and JSON can carry half of a surrogate pair.
            for part in (field.name.encode(), value.encode(errors="surrogatepass")):
                digest.update(len(part).to_bytes(8, "big"))
                digest.update(part)
        return digest.digest()
