"""One JSON line per request: who decided what, and how it ended. No text of a prompt, no header of a client."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from router.errors import JsonObject
    from router.telemetry.record import RequestRecord

access_logger = logging.getLogger("crossfill.access")

_POLLED_ROUTES = frozenset({"/live", "/ready", "/metrics"})


def log_request(record: RequestRecord, *, method: str, route: str | None, time_s: float, duration_s: float) -> None:
    """Write the line: level INFO, or DEBUG for routes that machines poll. `time_s` is Unix time, of the end."""
    level = logging.DEBUG if route in _POLLED_ROUTES else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    line: JsonObject = {
        "time_s": round(time_s, 3),
        "request_id": record.request_id,
        "tenant": record.tenant,
        "operator": record.operator,
        "method": method,
        "route": route or "other",
        "status": record.status,
        "outcome": record.outcome.value if record.outcome else None,
        "error_code": record.error_code,
        "model": record.model,
        "worker": record.worker,
        "placement": record.placement.to_json() if record.placement else None,
        "attempts": record.attempts,
        "retries": record.retries,
        "reuse": record.reuse.mode.value,
        "reuse_reason": record.reuse.reason.value if record.reuse.reason else None,
        "reuse_row_blocks": record.reuse.row_blocks.to_json() if record.reuse.row_blocks else None,
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6),
        "duration_s": round(duration_s, 6),
        "ttft_unknown": record.ttft_unknown,
        "decision": record.decision.to_json() if record.decision else None,
    }
    # Not by log(): that looks for its caller, which takes as long as all the rest.
    access_logger.handle(logging.LogRecord(access_logger.name, level, "", 0, orjson.dumps(line).decode(), None, None))
