"""A store on a Redis server that speaks TLS only."""

from __future__ import annotations

import logging
import shutil
import subprocess
import traceback
from typing import TYPE_CHECKING

import pytest
import redis

from cache_store.backends.redis import RedisBackend
from cache_store.errors import StoreUnavailableError, StoreUrlError

from .redis_server import RedisServer, free_port
from .sample_pages import A, chain, look, put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PASSWORD = "right-secret"


def make_certificate(folder: Path, name: str, *, signed_by: str | None = None) -> None:
    """`name.crt` and `name.key`: a CA, or a server's for 127.0.0.1 that a CA signed."""
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-subj", f"/CN={name}"]
    if signed_by is None:
        steps = [["req", "-x509", *key, "-days", "2", "-out", f"{name}.crt"]]
    else:
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
        signer = ["-CA", f"{signed_by}.crt", "-CAkey", f"{signed_by}.key", "-CAcreateserial", "-extfile", "names"]
        request = f"{name}.csr"
        steps = [["req", *key, "-out", request], ["x509", "-req", "-in", request, *signer, "-out", f"{name}.crt"]]
    for step in steps:
        subprocess.run(["openssl", *step], cwd=folder, check=True, capture_output=True)


class TlsServer(RedisServer):
    """Its plain port is closed."""

    def client(self) -> redis.Redis:
        """As for a plain one."""
        return redis.Redis(
            "127.0.0.1",
            int(self._options["tls_port"]),
            password=self.password,
            ssl=True,
            ssl_ca_certs=self._options["tls_ca_cert_file"],
            ssl_certfile=self._options["tls_cert_file"],
            ssl_keyfile=self._options["tls_key_file"],
        )

    def tls_url(self, **options: str) -> str:
        """A store on it."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"rediss://:{self.password}@127.0.0.1:{self._options['tls_port']}/0?{query}"


@pytest.fixture(scope="module")
def folder(redis_folder: Path) -> Path:
    """With a CA and what it signed, and another CA."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl is installed to make certificates with")
    made = redis_folder / "tls"
    made.mkdir()
    make_certificate(made, "ca")
    make_certificate(made, "other")
    make_certificate(made, "server", signed_by="ca")
    make_certificate(made, "client", signed_by="ca")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TlsServer]:
    """It wants no certificate of its clients."""
    probe = subprocess.run(["redis-server", "--tls-port", "x"], capture_output=True, text=True, check=False)
    if "Bad directive" in probe.stdout + probe.stderr:
        pytest.skip("this redis-server was built without TLS")
    started = TlsServer(
        folder / "server",
        port="0",
        tls_port=str(free_port()),
        tls_cert_file=str(folder / "server.crt"),
        tls_key_file=str(folder / "server.key"),
        tls_ca_cert_file=str(folder / "ca.crt"),
        tls_auth_clients="no",
        requirepass=PASSWORD,
    )
    yield started
    started.stop()


def test_a_store_behind_tls_works(server: TlsServer, folder: Path) -> None:
    backend = RedisBackend.from_url(server.tls_url(ca_file=f"{folder}/ca.crt"), deadline_s=10)
    names = [f"page-{number}" for number in range(200)]
    assert put(backend, chain(A, *names, size=20_000)).pages == 200
    assert None not in look(backend, A, *names)
    wanted = [(page.key, "mass/0") for page in chain(A, *names, size=20_000)]
    assert backend.read(A.scope, wanted) == [page.records["mass/0"] for page in chain(A, *names, size=20_000)]
    with pytest.raises(redis.ConnectionError):
        RedisServer.client(server).ping()
    backend.close()


@pytest.mark.parametrize("ca", ["another", "the system's"])
def test_a_server_of_an_unknown_authority_is_refused(
    server: TlsServer, folder: Path, ca: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    options = {"ca_file": f"{folder}/other.crt"} if ca == "another" else {}
    with pytest.raises(StoreUnavailableError, match="certificate") as raised:
        RedisBackend.from_url(server.tls_url(**options), deadline_s=10)
    text = "".join(traceback.format_exception(raised.value)) + repr(raised.value) + caplog.text
    assert PASSWORD not in text
    assert "\n" not in str(raised.value)


def test_a_certificate_of_another_host_is_refused(server: TlsServer, folder: Path) -> None:
    url = server.tls_url(ca_file=f"{folder}/ca.crt").replace("127.0.0.1", "localhost")
    with pytest.raises(StoreUnavailableError, match="certificate"):
        RedisBackend.from_url(url, deadline_s=10)


def test_plain_text_to_a_tls_port_and_tls_to_a_plain_one_are_unavailable(
    server: TlsServer, folder: Path, redis_server: RedisServer
) -> None:
    plain = server.tls_url().replace("rediss://", "redis://")
    encrypted = redis_server.url("rediss", ca_file=f"{folder}/ca.crt")
    for url in (plain, encrypted):
        with pytest.raises(StoreUnavailableError):
            RedisBackend.from_url(url, deadline_s=2)


def test_a_server_that_wants_a_certificate_gets_the_clients(server: TlsServer, folder: Path) -> None:
    server.client().config_set("tls-auth-clients", "yes")
    own = {"cert_file": f"{folder}/client.crt", "key_file": f"{folder}/client.key"}
    assert put(RedisBackend.from_url(server.tls_url(ca_file=f"{folder}/ca.crt", **own), deadline_s=10), []).pages == 0
    with pytest.raises(StoreUnavailableError):
        RedisBackend.from_url(server.tls_url(ca_file=f"{folder}/ca.crt"), deadline_s=10)
    server.client().config_set("tls-auth-clients", "no")


@pytest.mark.parametrize("option", ["ca_file", "cert_file", "key_file"])
def test_a_file_that_is_not_there_is_an_error_of_the_url(server: TlsServer, folder: Path, option: str) -> None:
    files = {"ca_file": f"{folder}/ca.crt", option: "/nowhere/file.pem"}
    with pytest.raises(StoreUrlError, match=f"{option}.*/nowhere/file.pem") as raised:
        RedisBackend.from_url(server.tls_url(**files), deadline_s=10)
    assert PASSWORD not in str(raised.value)
