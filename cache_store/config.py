"""Settings of the store."""

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import quote, unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cache_store.backends.opening import SCHEMES
from cache_store.backends.protocol import Limits
from cache_store.backends.redis_address import SCHEMES as REDIS_SCHEMES
from cache_store.backends.redis_address import parse_address
from cache_store.sizes import SizeBytes

DEFAULT_FOLDER = Path("var/store")
"""Of the embedded store, relative to where the program was started."""


def default_url() -> str:
    """The embedded store in `DEFAULT_FOLDER`."""
    return f"lmdb://{quote(str(DEFAULT_FOLDER.absolute()))}"


def is_unmade(url: str) -> bool:
    """Whether `url` names an embedded store that nobody has made yet, which opening it would do."""
    parts = urlsplit(url)
    return parts.scheme == "lmdb" and not Path(unquote(parts.path)).is_dir()


def _check_url(url: str) -> str:
    # No message repeats the URL: it may hold a password.
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(f"no store's URL; it begins with {', '.join(f'{name}://' for name in SCHEMES)}")
    if scheme in REDIS_SCHEMES:
        parse_address(url)
    elif scheme == "lmdb" and not rest.partition("?")[0].strip("/"):
        raise ValueError("a store in a folder is written lmdb:///absolute/path")
    elif scheme == "lmdb" and not rest.startswith("/"):
        raise ValueError("a store in a folder is written lmdb:///absolute/path, with three slashes")
    return url


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class StoreSettings(BaseModel):
    """Where state is kept and how much of it; each has a default that is safe on a small machine.

    Attributes:
        url: as `open_backend` takes it.
        budget_bytes: most that the whole store may hold.
        tenant_bytes: most that one tenant may hold; without it, the whole budget.
        deadline_s: longest that one call of the backend may take.
        fetch_deadline_s: after which a request's fetch ends, whatever is missing.
        fetch_threads: that read for requests.
        fetches_in_flight: requests that read or wait to read; more are refused.
        fetched_bytes: of what was read for requests that wait for their turn; while there is more, no more is read.
        queue_bytes: of records that wait to be published; more are dropped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, AfterValidator(_check_url)] = Field(default_factory=default_url, repr=False)
    budget_bytes: SizeBytes = Field(default=4 * 2**30, ge=2**20)
    tenant_bytes: SizeBytes | None = Field(default=None, ge=2**20)
    deadline_s: Seconds = 1.0
    fetch_deadline_s: Seconds = 5.0
    fetch_threads: int = Field(default=2, ge=1, le=64)
    fetches_in_flight: int = Field(default=64, ge=1)
    fetched_bytes: SizeBytes = Field(default=512 * 2**20, ge=2**20)
    queue_bytes: SizeBytes = Field(default=64 * 2**20, ge=2**16)

    @model_validator(mode="after")
    def _tenant_fits(self) -> Self:
        if self.tenant_bytes is not None and self.tenant_bytes > self.budget_bytes:
            raise ValueError("tenant_bytes is more than budget_bytes, so it would bound nothing")
        return self

    @property
    def shown_url(self) -> str:
        """The URL for people: with a password, `***` stands in its place."""
        parts = urlsplit(self.url)
        if parts.password is None:
            return self.url
        credentials, _, host = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{credentials.partition(':')[0]}:***@{host}").geturl()

    @property
    def limits(self) -> Limits:
        """What a publish keeps to."""
        return Limits(self.budget_bytes, self.tenant_bytes or self.budget_bytes)
