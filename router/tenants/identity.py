"""Who sent a request: from its API key to its tenant, the only source of cache namespaces."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from router.errors import AuthFailure, InvalidApiKeyError
from router.telemetry.record import record_of
from router.tenants.key_file import KEY_PATTERN
from router.tenants.namespace import LOCAL_TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope

    from router.telemetry.metrics import RouterMetrics
    from router.tenants.keyring import Keyring

# The scheme has no case (RFC 9110, 11.1).
_BEARER = re.compile(f"bearer +({KEY_PATTERN}) *".encode(), re.IGNORECASE)


class Identity:
    """Knows the tenant of each request; without a keyring that is always `local`, whatever key a client sends."""

    def __init__(self, keyring: Keyring | None, metrics: RouterMetrics) -> None:
        self._keyring = keyring
        self._metrics = metrics

    def identify(self, scope: Scope) -> str:
        """The tenant, put on the request's record too; call it before anything is read. Raises InvalidApiKeyError."""
        tenant = LOCAL_TENANT if self._keyring is None else self._owner(self._keyring, scope)
        record_of(scope).tenant = tenant
        return tenant

    def _owner(self, keyring: Keyring, scope: Scope) -> str:
        found = _presented(scope["headers"])
        tenant = found if isinstance(found, AuthFailure) else keyring.tenant_of(found) or AuthFailure.UNKNOWN
        if isinstance(tenant, AuthFailure):
            self._metrics.count_auth_failure(tenant)
            raise InvalidApiKeyError(tenant)
        return tenant


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | AuthFailure:
    """The key in the one Authorization header, or what is wrong with it."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        return AuthFailure.MISSING
    match = _BEARER.fullmatch(values[0]) if len(values) == 1 else None
    return AuthFailure.MALFORMED if match is None else match[1]
