"""Who sent a request: from its API key to its tenant, the only source of cache namespaces, or to an operator."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from router.errors import AdministrationOffError, AuthFailure, InvalidApiKeyError
from router.telemetry.record import record_of
from router.tenants.key_file import KEY_PATTERN
from router.tenants.namespace import LOCAL_TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope

    from router.telemetry.metrics import RouterMetrics
    from router.tenants.keyring import Keyring, Keyrings

# The scheme has no case (RFC 9110, 11.1).
_BEARER = re.compile(f"bearer +({KEY_PATTERN}) *".encode(), re.IGNORECASE)


class Identity:
    """Knows the tenant of each request; without client keys that is always `local`, whatever key a client sends."""

    def __init__(self, keyrings: Keyrings, metrics: RouterMetrics) -> None:
        self._keyrings = keyrings
        self._metrics = metrics

    def identify(self, scope: Scope) -> str:
        """The tenant, put on the request's record too; call it before anything is read. Raises InvalidApiKeyError."""
        clients = self._keyrings.clients
        tenant = LOCAL_TENANT if clients is None else self._owner(clients, scope)
        record_of(scope).tenant = tenant
        return tenant

    def identify_operator(self, scope: Scope) -> str:
        """The operator, put on the request's record too; call it before anything is read.

        Raises AdministrationOffError if nobody can be one, InvalidApiKeyError for every key but an operator's.
        """
        operators = self._keyrings.operators
        if operators is None:
            raise AdministrationOffError
        operator = self._owner(operators, scope, hint="Administration takes a key of `auth.admin_keys_file`.")
        record_of(scope).operator = operator
        return operator

    def _owner(self, keyring: Keyring, scope: Scope, hint: str = "") -> str:
        found = _presented(scope["headers"])
        owner = found if isinstance(found, AuthFailure) else keyring.owner_of(found) or AuthFailure.UNKNOWN
        if isinstance(owner, AuthFailure):
            self._metrics.count_auth_failure(owner)
            raise InvalidApiKeyError(owner, hint)
        return owner


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | AuthFailure:
    """The key in the one Authorization header, or what is wrong with it."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        return AuthFailure.MISSING
    match = _BEARER.fullmatch(values[0]) if len(values) == 1 else None
    return AuthFailure.MALFORMED if match is None else match[1]
