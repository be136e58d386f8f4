"""What a request says about reuse: the router's word in `custom_params`, as SGLang hands it through."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = "crossfill"


class Mode(StrEnum):
    """Whether a request may be answered from state that other models left."""

    OFF = "off"
    ALLOW = "allow"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the router says of a request.

    Attributes:
        mode: of reuse.
        tenant: whose it is, as the router authenticated it.
        salt: further separation that the client asked for.
    """

    mode: Mode
    tenant: str
    salt: str = ""


def read_asked(custom_params: Mapping[str, object] | None) -> Asked | None:
    """The router's word; None for a request that did not come through a router, or says nothing that is understood.

    Without a tenant nothing may be shared, so such a request neither takes nor leaves anything.
    """
    said = (custom_params or {}).get(_NAME)
    if not isinstance(said, dict):
        return None
    mode, tenant, salt = said.get("reuse"), said.get("tenant"), said.get("salt", "")
    if mode not in list(Mode) or not isinstance(tenant, str) or not tenant or not isinstance(salt, str):
        return None
    return Asked(Mode(mode), tenant, salt)
