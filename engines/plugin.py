"""Entry point `sglang.srt.plugins`: what Crossfill adds to SGLang in each of its processes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.attention.backend import CrossfillAttentionBackend

ATTENTION_BACKEND = "crossfill"
"""Value of SGLang's --attention-backend that selects ours."""


def register() -> None:
    """Register the attention backend; end the process with one line when SGLang moved.

    Raises:
        SystemExit: SGLang is not the pinned one. SGLang logs and swallows a plugin's ordinary exceptions, and a worker
            that silently ran without its plugin would look healthy, so this one must not be an `Exception`.
    """
    from engines import compat
    from engines.errors import IncompatibleSglangError

    try:
        compat.check()
    except IncompatibleSglangError as error:
        raise SystemExit(f"crossfill: {error}") from error
    compat.add_attention_backend(ATTENTION_BACKEND, _make_backend)


def _make_backend(runner: Any) -> "CrossfillAttentionBackend":
    # Imported when a model runner asks for it: only the scheduler process needs the backend's imports.
    from engines.attention.backend import CrossfillAttentionBackend

    return CrossfillAttentionBackend(runner)
