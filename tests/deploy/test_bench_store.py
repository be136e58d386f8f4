"""The store benchmark measures all sides, and refuses to time what is wrong. Speeds are not judged here."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
from rich.console import Console

from cache_store.backends.memory import MemoryBackend
from cache_store.radix import HeldPages, RadixMirror
from crossfill.bench_store import bench_store
from crossfill.bench_store_report import Side, StoreBench, StoreResults, report, tables
from crossfill.errors import BenchError

SMALL = StoreBench(("memory://",), (128, 192), records=2, record_bytes=200, rounds=2, mirror_pages=(400, 1000))


def run(bench=SMALL, output=None):
    return bench_store(bench, output=output, console=Console(quiet=True), progress=lambda *_: None)


def test_each_operation_is_measured_and_written_down(tmp_path):
    results = run(output=tmp_path / "result.json")
    assert [(one.tokens, one.operation, one.pages) for one in results.measured] == [
        (tokens, operation, tokens // 64) for tokens in (128, 192) for operation in ("publish", "match", "read")
    ]
    assert [one.size_bytes for one in results.measured[:3]] == [2 * 2 * 200, 0, 2 * 200]
    for one in results.measured:
        assert set(one.taken_s) == {Side.STORE, Side.BACKEND}
        assert min(one.taken_s[Side.STORE]) > 0
        assert one.ratio(Side.RAW) is None, "memory has no library below it"
    for mirror, least in zip(results.mirrors, (400, 1000), strict=True):
        assert least <= mirror.pages < least + 400
        assert mirror.prefixes >= 2
    written = json.loads((tmp_path / "result.json").read_text())
    assert len(written["stores"]) == 6
    assert written["stores"][0]["taken_s"]["store"] == list(results.measured[0].taken_s[Side.STORE])
    assert written["machine"]["cores"] >= 1


def test_the_tables_have_a_row_for_each_measurement():
    stores, mirror = tables(SMALL, run())
    assert (stores.row_count, mirror.row_count) == (6, 2)


@pytest.mark.parametrize(
    ("operation", "wrong", "said"),
    [
        ("lookup", lambda found: [None, *found[1:]], "pages were not found"),
        ("read", lambda found: [found[0] + b"!", *found[1:]], "other bytes were read"),
    ],
)
def test_what_is_wrong_is_not_timed(monkeypatch, operation, wrong, said):
    right = getattr(MemoryBackend, operation)
    monkeypatch.setattr(MemoryBackend, operation, lambda self, *given: wrong(right(self, *given)))
    with pytest.raises(BenchError, match=said):
        run()


def test_a_mirror_that_forgets_is_not_timed(monkeypatch):
    monkeypatch.setattr(RadixMirror, "match", lambda *_: HeldPages({}))
    with pytest.raises(BenchError, match="the radix mirror found 0 of 312 pages"):
        run()


def test_a_report_has_no_password(monkeypatch):
    monkeypatch.setattr("sys.argv", ["crossfill", "bench", "store", "--url=redis://user:secret@host:1/0"])
    bench = replace(SMALL, urls=("redis://user:secret@host:1/0?name=x",))
    told = json.dumps(report(bench, StoreResults([], None, [])))
    assert "redis://host:1/0?name=x" in told
    assert "secret" not in told


@pytest.mark.skipif(
    not (shutil.which("redis-server") and find_spec("cache_store.backends.redis")), reason="there is no Redis here"
)
def test_by_default_every_kind_that_can_be_started_is_measured():
    results = run(replace(SMALL, urls=(), tokens=(128,)))
    assert [one.url.partition(":")[0] for one in results.measured[::3]] == ["memory", "lmdb", "redis"]
    for one in results.measured[3:]:
        assert one.ratio(Side.RAW) > 0
        assert one.ratio(Side.PACKED) > 0
    assert results.hung is not None
    # Nothing else waits for a server that hangs; the test's own bound is generous.
    assert max(results.hung.waited_s) < 5
