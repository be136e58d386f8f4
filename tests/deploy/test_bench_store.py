"""The store benchmark measures all sides, and refuses to time what is wrong. Speeds are not judged here."""

import io
import json
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
from rich.console import Console

from cache_store.backends.memory import MemoryBackend
from cache_store.radix import HeldPages, RadixMirror
from crossfill.bench_radix import MirrorSize, Removal
from crossfill.bench_store import bench_store
from crossfill.bench_store_report import Hung, Measured, PageMemory, Side, StoreBench, StoreResults, report, tables
from crossfill.errors import BenchError

SMALL = StoreBench(
    ("memory://",),
    (128, 192),
    records=2,
    record_bytes=200,
    rounds=2,
    least_lookups=3,
    memory_pages=256,
    mirror_pages=(400, 1000),
)


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
        assert 16 * mirror.pages < mirror.used_bytes < 2 * mirror.counted_bytes
    assert [removal.nodes for removal in results.removals] == [400, 1000]
    assert min(min(removal.match_s) for removal in results.removals) > 0
    written = json.loads((tmp_path / "result.json").read_text())
    assert len(written["stores"]) == 6
    assert [(one["records"], one["pages"]) for one in written["memory"]] == [(2, 256), (1, 256), (0, 256)]
    assert len(written["removals"]) == 2
    assert written["stores"][0]["taken_s"]["store"] == list(results.measured[0].taken_s[Side.STORE])
    assert written["machine"]["cores"] >= 1


def test_the_tables_have_a_row_for_each_measurement():
    stores, memory, mirror, removals = tables(SMALL, run())
    assert (stores.row_count, memory.row_count, mirror.row_count, removals.row_count) == (6, 3, 2, 2)


def test_lookups_and_reads_are_enough_for_a_p99_by_default():
    assert StoreBench().least_lookups >= 200
    for rounds, operations in ((1, (1, 120, 120)), (50, (50, 250, 120))):
        measured = run(replace(SMALL, tokens=(128,), rounds=rounds, least_lookups=120)).measured
        assert tuple(len(one.taken_s[Side.STORE]) for one in measured) == operations
        assert [one.p99_s(Side.STORE) is None for one in measured] == [True, False, False]


def test_tables_fit_a_terminal_of_80_columns_uncut():
    sides = {side: [0.123456] * 200 for side in Side}
    measured = [Measured("redis://host:1/0", 20_000, name, 312, 5_616_000, sides) for name in ("publish", "match")]
    memory = [PageMemory("redis://host:1/0", 2048, 30, 12_345.6, 12_345.6)]
    mirrors = [MirrorSize(1_000_272, 3206, 17_600_000, 17_100_000, [123.4e-6] * 200)]
    removals = [Removal(1_000_000, 12.345678, [0.123456] * 200_000)]
    results = StoreResults(measured, memory, Hung("redis://host:1/0", 0.02, [0.12345] * 20), mirrors, removals)
    narrow, wide = (Console(width=width, file=io.StringIO()) for width in (80, 200))
    for console in (narrow, wide):
        for table in tables(StoreBench(), results):
            # Titles and captions are as wide as their tables, and fold.
            table.title = table.caption = None
            console.print(table)
    lines = [line.rstrip() for line in narrow.file.getvalue().splitlines()]
    assert lines == [line.rstrip() for line in wide.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert sum("publish" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("operation", "wrong", "said"),
    [
        ("lookup", lambda found: replace(found, digests=[None, *found.digests[1:]]), "pages were not found"),
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


def test_a_removal_that_takes_another_holders_pages_is_not_timed(monkeypatch):
    right = RadixMirror.match
    monkeypatch.setattr(RadixMirror, "match", lambda self, keys: right(self, keys) if len(keys) > 2 else HeldPages({}))
    with pytest.raises(BenchError, match="lost a holder's pages"):
        run()


def test_a_holder_that_stays_after_its_removal_is_told(monkeypatch):
    monkeypatch.setattr(RadixMirror, "remove", lambda *_: 0)
    with pytest.raises(BenchError, match="still knows a holder"):
        run()


def test_a_report_has_no_password(monkeypatch):
    monkeypatch.setattr("sys.argv", ["crossfill", "bench", "store", "--url=redis://user:secret@host:1/0"])
    bench = replace(SMALL, urls=("redis://user:secret@host:1/0?name=x",))
    told = json.dumps(report(bench, StoreResults([], [], None, [], [])))
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
    assert {(one.url.partition(":")[0], one.records) for one in results.memory} == {
        (kind, records) for kind in ("memory", "lmdb", "redis") for records in (2, 1, 0)
    }
    for one in results.memory:
        # Digest, parent and key alone are 64 bytes.
        assert one.used_bytes > 64
        assert one.counted_bytes > 64
    assert results.hung is not None
    # Nothing else waits for a server that hangs; the test's own bound is generous.
    assert max(results.hung.waited_s) < 5
