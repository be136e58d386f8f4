from __future__ import annotations

import asyncio
import os
import time
from datetime import date
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from router.errors import ConfigError
from router.telemetry.metrics import RouterMetrics
from router.tenants.key_file import KeyEntry, parse_keys, read_keys, sha256_of
from router.tenants.keyring import Keyring, KeyWatch

if TYPE_CHECKING:
    from pathlib import Path

HASH = "0123456789abcdef" * 4
OTHER = "f" * 64
SECRET = "cf-a-key-in-the-wrong-place"


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_line_is_tenant_hash_date_and_label(tmp_path: Path) -> None:
    text = f"# a comment\n\nacme  sha256:{HASH}\t2026-01-31   build server 2\r\n  b.c_d-1 sha256:{OTHER.upper()}\n"
    assert read_keys(file_of(tmp_path, text)) == (
        KeyEntry("acme", HASH, date(2026, 1, 31), "build server 2"),
        KeyEntry("b.c_d-1", OTHER),
    )


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    for entry in (
        KeyEntry("a", HASH, date(2026, 1, 31), "two words"),
        KeyEntry("a", HASH, None, "- x"),
        KeyEntry("a", HASH),
    ):
        assert parse_keys(entry.to_line(), tmp_path) == (entry,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{SECRET}\n", ":1: not a key: write TENANT sha256:HASH"),
        (f"\nacme {SECRET}\n", ":2: not a key: write TENANT sha256:HASH"),
        (f"acme sha256:{HASH[1:]}\n", ":1: not a key"),
        (f"acme md5:{HASH}\n", ":1: not a key"),
        (f"a/b sha256:{HASH}\n", ":1: not a tenant name"),
        (f"ä sha256:{HASH}\n", ":1: not a tenant name"),
        (f"-a sha256:{HASH}\n", ":1: not a tenant name"),
        (f"{'a' * 65} sha256:{HASH}\n", ":1: not a tenant name"),
        (f"acme sha256:{HASH} yesterday\n", ":1: not a date"),
        (f"acme sha256:{HASH} {SECRET}\n", ":1: not a date"),
        (f"a sha256:{HASH}\n#\nb sha256:{HASH.upper()}\n", ":3: the key 0123456789ab is already in line 1"),
        ("x" * (8 * 2**20 + 1), ": is larger than 8388608 bytes"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_not_repeated(tmp_path: Path, text: str, told: str) -> None:
    path = file_of(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        Keyring(path)
    assert str(caught.value).startswith(f"{path}{told}")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "# nobody yet\n"])
def test_a_file_without_keys_ends_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="has no key, nobody could use the router"):
        Keyring(file_of(tmp_path, text))


def test_a_file_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys: cannot be read: No such file"):
        Keyring(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Keyring(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Keyring(tmp_path / "latin")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    path = file_of(tmp_path, f"a sha256:{HASH}\n")
    path.chmod(mode)
    assert len(Keyring(path)) == 1
    assert ("can be read by others" in caplog.text) == warned


def test_only_a_listed_key_has_a_tenant(tmp_path: Path) -> None:
    ring = Keyring(file_of(tmp_path, f"a sha256:{sha256_of(b'one')}\nb sha256:{sha256_of(b'two')}\n"))
    assert [ring.owner_of(key) for key in (b"one", b"two", b"three", b"")] == ["a", "b", None, None]


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path, f"a sha256:{HASH}\n")
    ring = Keyring(path)
    reads: list[Path] = []
    monkeypatch.setattr("router.tenants.keyring.read_keys", lambda path: reads.append(path) or read_keys(path))
    assert not ring.refresh()
    assert not reads
    # Same size and same date, as copying programs set it.
    before = path.stat()
    path.write_text(f"b sha256:{HASH}\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ring.refresh()
    assert len(reads) == 1


async def test_a_lasting_fault_is_told_once_and_a_new_one_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of(tmp_path, f"a sha256:{HASH}\n")
    ring, registry = Keyring(path), CollectorRegistry()
    watch = KeyWatch(ring, RouterMetrics(registry))

    async def told() -> tuple[int, float]:
        for _ in range(5):
            await watch.check(ring)
        errors = sum(record.levelname == "ERROR" for record in caplog.records)
        return errors, registry.get_sample_value("crossfill_keys_reload_failures_total") or 0

    assert await told() == (0, 0)
    path.write_text("nonsense")
    assert await told() == (1, 1)
    path.unlink()
    assert await told() == (2, 2)
    path.write_text(f"a sha256:{HASH}\n")
    assert await told() == (2, 2)
    path.unlink()
    assert await told() == (3, 3)
    os.mkfifo(path)
    assert await told() == (4, 4)
    path.unlink()
    path.write_text(f"b sha256:{HASH}\n")
    assert await told() == (4, 4)


async def test_a_watch_that_ends_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Keyring(file_of(tmp_path, f"a sha256:{HASH}\n"))

    def fail() -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(ring, "refresh", fail)
    async with KeyWatch(ring, RouterMetrics(CollectorRegistry()), poll_s=0.001), asyncio.timeout(5):
        while "no longer watched" not in caplog.text:  # noqa: ASYNC110 - a log line
            await asyncio.sleep(0.005)


def test_looking_up_is_as_quick_among_many_keys_as_among_few(tmp_path: Path) -> None:
    def lookup_s(count: int) -> float:
        lines = [KeyEntry("a", sha256_of(str(n).encode())).to_line() for n in range(count)]
        ring = Keyring(file_of(tmp_path, "".join(lines)))
        times = []
        for _ in range(200):
            started = time.perf_counter()
            assert ring.owner_of(str(count - 1).encode()) == "a"
            times.append(time.perf_counter() - started)
        return sorted(times)[len(times) // 2]

    # Comparing with each key in turn would take a thousand times as long.
    assert lookup_s(5000) < 20 * lookup_s(5)
