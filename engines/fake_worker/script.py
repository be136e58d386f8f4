"""The script of a fake worker: what it answers, how fast, and which faults it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ScriptError(Exception):
    """A script file that cannot be used; the message is one line and names the file and the key."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SlowHealth(_Part):
    """`/health` answers, but only after `slow_s`."""

    slow_s: Seconds


Health = Literal["ok", "failing", "hanging"] | SlowHealth
"""`failing` answers 503, `hanging` never answers."""


class Reply(_Part):
    """The answer to one request, for a chat or a text completion.

    Content: `raw_chunks` are written as they are, one write each, and are the whole body of a stream. Otherwise each of
    `chunks` is an event: a string is content, an object a whole delta, an object with `choices` a whole event. Without
    them, `text` is cut into words. A request for several choices gets each delta for every one of them.

    Faults, tried in this order: `hang` never answers, `close_before_headers` drops the connection, a `status` other
    than 200 sends `body` as JSON (or as it is, if a string). In a stream, `close_after_chunks` and `error_event_after`
    count content chunks, after the chunk with the role; `no_done` leaves `[DONE]` out. `gzip` compresses what is sent.

    `reuse` is what the header `x-crossfill-reuse` says. `reuse_refusal` is a reason why nothing is reused: a request
    that requires reuse gets status 409, any other its answer, and the header says `none` with that reason.
    """

    text: str = "Hello from the fake worker."
    chunks: tuple[str | dict[str, Any], ...] | None = None
    raw_chunks: tuple[bytes, ...] | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    reuse: str | None = None
    reuse_refusal: str | None = None
    ttft_s: Seconds = 0.0
    inter_token_s: Seconds = 0.0
    status: int = Field(default=200, ge=100, le=599)
    body: str | dict[str, Any] | None = None
    hang: bool = False
    close_before_headers: bool = False
    close_after_chunks: int | None = Field(default=None, ge=0)
    error_event_after: int | None = Field(default=None, ge=0)
    no_done: bool = False
    gzip: bool = False

    def pieces(self) -> list[dict[str, Any]]:
        """The content of a stream, one delta or whole event each."""
        if self.chunks is None:
            words = self.text.split(" ")
            return [{"content": word if index == 0 else f" {word}"} for index, word in enumerate(words)]
        return [{"content": chunk} if isinstance(chunk, str) else chunk for chunk in self.chunks]

    def all_headers(self) -> dict[str, str]:
        """`headers`, and the one about reuse if there is anything to say of it."""
        said = self.reuse
        if said is None and self.reuse_refusal is not None:
            said = f"none; reason={self.reuse_refusal}"
        return {**({} if said is None else {"x-crossfill-reuse": said}), **self.headers}

    def message_text(self) -> str:
        """The content of an answer in one piece."""
        return "".join(str(piece.get("content") or "") for piece in self.pieces())


class Script(_Part):
    """All of a fake worker: `responses` answer requests in order, the last one again and again."""

    model: str = "fake-model"
    health: Health = "ok"
    responses: tuple[Reply, ...] = Field(default=(Reply(),), min_length=1)


def load_script(path: Path | str) -> Script:
    """Read a script from a YAML file; `!!binary` gives bytes for `raw_chunks`. Raises ScriptError."""
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Script.model_validate(data or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ScriptError(f"{path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ScriptError(f"{path}: {where}: {first['msg']}") from error
