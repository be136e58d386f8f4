"""`crossfill store` on a store in a folder: in this process, and as a shell sees it where that is what matters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.protocol import Limits, PageWrite
from cache_store.keys import PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import Kind, Record
from cache_store.store import Store, scope_info
from crossfill.cli import app

PLENTY = Limits(2**30, 2**30)
TOKENS = list(range(4 * PAGE))
ONE = Namespace("acme", "small", "r1" * 16, "tokenizer", "template")
TWO = Namespace("bolt", "large", "r2" * 16, "tokenizer", "template")
KEYS = page_keys(ONE.scope, TOKENS)


@pytest.fixture
def folder(tmp_path):
    """A store with four pages of each of two namespaces."""
    with_pages(tmp_path / "store")
    return tmp_path / "store"


def with_pages(folder):
    def fill(store, _backend):
        for of in (ONE, TWO):
            pages = enumerate(page_keys(of.scope, TOKENS))
            store.publish(of, TOKENS, {index: [record(page, layer) for layer in (0, 1)] for index, page in pages})

    at(folder, fill)


def record(page, layer):
    return Record(Kind.MASS, layer, (2, 3), "u1", page.tokens_digest, bytes([layer]) * 500)


def at(folder, work):
    """What `work` gives, of the store and its backend, opened for it alone."""
    backend = LmdbBackend(folder)
    try:
        return work(Store(backend, PLENTY, StoreMetrics(CollectorRegistry())), backend)
    finally:
        backend.close()


def held(folder):
    """What a store says that it holds."""
    return at(folder, lambda store, _: store.stats())


def pages_of(folder):
    return sum(scope.pages for scope in held(folder).scopes)


def found(folder, of):
    return at(folder, lambda store, _: store.match(of, TOKENS))


@pytest.fixture
def store(folder):
    """Run `crossfill store COMMAND … --url` of the folder, in this process; an unexpected error is raised."""

    def run(*arguments, at=folder):
        command = ["store", *map(str, arguments), "--url", f"lmdb://{at}"]
        return CliRunner().invoke(app, command, env={"COLUMNS": "160"}, catch_exceptions=False)

    return run


@pytest.fixture
def shell(crossfill, folder):
    """The same in a process of its own, whose output is piped."""

    def run(*arguments, at=folder):
        return crossfill("store", *arguments, "--url", f"lmdb://{at}", COLUMNS="160")

    return run


def damage(folder, index, name):
    def work(_, backend):
        page = KEYS[index]
        [data] = backend.read(ONE.scope, [(page.key, name)])
        altered = PageWrite(page.key, page.parent, page.tokens_digest, {name: data[:-1] + b"!"})
        backend.publish(scope_info(ONE), [altered], PLENTY)

    at(folder, work)


def test_stats_have_a_row_for_each_namespace_and_the_whole(shell):
    lines = shell("stats").stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in lines[1:3]}
    assert rows["acme"][:6] == ["acme", "small", ("r1" * 16)[:12], ONE.scope.hex()[:12], "0", "4"]
    assert rows["bolt"][1] == "large"
    assert lines[3].startswith("8 pages, ")


def test_stats_for_machines(store):
    told = json.loads(store("stats", "--json").stdout)
    assert told["pages"] == 8
    assert told["size_bytes"] >= sum(namespace["size_bytes"] for namespace in told["namespaces"]) > 8 * 2 * 500
    assert {(one["tenant"], one["namespace"], one["revision"]) for one in told["namespaces"]} == {
        (of.tenant, of.scope.hex(), of.revision) for of in (ONE, TWO)
    }


def test_inspect_lists_pages_and_the_records_of_one(store):
    pages = store("inspect", "--tenant", "acme").stdout.splitlines()
    assert [line.split()[0] for line in pages[1:]] == [page.key.hex()[:12] for page in KEYS]
    assert pages[1].split()[1] == "-", "the first page has no parent"
    assert pages[2].split()[1] == KEYS[0].key.hex()[:12]
    assert len(store("inspect", "--limit", "3").stdout.splitlines()) == 1 + 3
    records = store("inspect", "--key", KEYS[2].key.hex()[:10]).stdout.splitlines()[1:]
    assert [line.split()[:2] for line in records] == [[KEYS[2].key.hex(), name] for name in ("mass/0", "mass/1")]
    assert all("2 × 3" in line and "exact" in line and "intact" in line for line in records)


def test_inspect_for_machines_and_of_what_is_not_there(store):
    [page] = json.loads(store("inspect", "--key", KEYS[2].key.hex().upper(), "--json").stdout)
    assert (page["page"], page["parent"]) == (KEYS[2].key.hex(), KEYS[1].key.hex())
    assert page["records"][1] | {"name": "mass/1", "kind": "mass", "layer": 1, "shape": [2, 3]} == page["records"][1]
    assert page["records"][1]["tokens_digest"] == page["tokens_digest"] == KEYS[2].tokens_digest.hex()
    nothing = store("inspect", "--key", "00" * 16)
    assert (nothing.exit_code, nothing.stderr.strip()) == (0, "no page fits")
    assert store("inspect", "--key", "xyz").exit_code == 2


def test_verify_is_quiet_about_a_sound_store_and_names_what_is_wrong(store, shell, folder):
    sound = shell("verify")
    assert (sound.returncode, sound.stdout.strip()[:31]) == (0, "16 records of 8 pages (9.3 KiB)"), sound.stderr
    damage(folder, 1, "mass/0")
    found_wrong = shell("verify")
    assert found_wrong.returncode == 1
    [row] = [line for line in found_wrong.stdout.splitlines() if KEYS[1].key.hex()[:12] in line]
    assert "mass/0" in row
    assert "altered since it was written" in row
    told = json.loads(store("verify", "--json").stdout)
    assert [(fault["page"], fault["fault"], fault["removed"]) for fault in told["faults"]] == [
        (KEYS[1].key.hex(), "checksum", False)
    ]


def test_verify_repairs_when_asked(store, folder):
    damage(folder, 1, "mass/0")
    assert store("verify", "--repair").exit_code == 1
    assert found(folder, ONE).pages_with("mass/0") == (0, 2, 3)
    assert found(folder, ONE).pages_with("mass/1") == (0, 1, 2, 3)


def test_flush_takes_what_fits(store, folder):
    assert store("flush", "--model", "small", "--revision", "r1" * 16).stdout.startswith("flushed: 4 pages")
    assert found(folder, ONE).names == frozenset()
    assert found(folder, TWO).contiguous_pages("mass/0") == 4
    assert json.loads(store("flush", "--all", "--json").stdout)["pages"] == 4
    assert found(folder, TWO).names == frozenset()


def test_flush_takes_the_beginning_of_a_revision_as_stats_shows_it(store, folder):
    assert store("flush", "--revision", ("r1" * 16)[:12]).stdout.startswith("flushed: 4 pages")
    assert found(folder, TWO).contiguous_pages("mass/0") == 4
    assert len(json.loads(store("inspect", "--revision", "r2", "--json").stdout)) == 4
    assert store("flush", "--revision", "r9").stdout.startswith("flushed: 0 pages")
    # One revision is left; an empty variable of a script is not the beginning of it.
    assert store("flush", "--revision", "").stdout.startswith("flushed: 0 pages")


def test_a_beginning_of_several_revisions_is_refused(shell, folder):
    ended = shell("flush", "--revision", "r")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "begins several" in ended.stderr
    assert found(folder, ONE).contiguous_pages("mass/0") == 4


def test_tables_in_a_pipe_are_not_folded(shell):
    lines = shell("inspect").stdout.splitlines()
    assert len(lines) == 9
    assert all("small" in line or "large" in line for line in lines[1:])


@pytest.mark.parametrize("arguments", [(), ("--all", "--tenant", "acme")], ids=["nothing", "both"])
def test_flush_wants_to_be_told_exactly_what(shell, folder, arguments):
    ended = shell("flush", *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "or --all" in ended.stderr
    assert found(folder, ONE).contiguous_pages("mass/0") == 4


def test_evict_frees_as_much_as_asked_from_the_least_recently_used(store, folder):
    found(folder, ONE)
    whole = held(folder).size_bytes
    told = json.loads(store("evict", "1KiB", "--json").stdout)
    assert told["pages"] >= 1
    assert told["size_bytes"] >= 1024
    assert held(folder).size_bytes == whole - told["size_bytes"]
    assert found(folder, ONE).contiguous_pages("mass/0") == 4
    assert found(folder, TWO).contiguous_pages("mass/0") < 4
    assert store("evict", "1 KB").exit_code == 2


def test_compact_keeps_what_is_there(store, folder):
    at(folder, lambda s, _: s.flush(tenant="acme"))
    assert store("compact").exit_code == 0
    assert found(folder, TWO).contiguous_pages("mass/0") == 4
    assert found(folder, ONE).names == frozenset()


@pytest.mark.parametrize("name", ["pages", "pages.zst"])
def test_export_and_import_carry_pages_to_another_store(store, folder, tmp_path, name):
    assert store("export", tmp_path / name).stdout.startswith("8 pages are in")
    imported = store("import", tmp_path / name, at=tmp_path / "other")
    assert imported.exit_code == 0, imported.stderr
    assert imported.stdout.startswith("8 pages of ")
    for of in (ONE, TWO):
        assert found(tmp_path / "other", of) == found(folder, of)
    wanted = [(page, "mass/1") for page in KEYS]
    assert at(tmp_path / "other", lambda s, _: s.read(ONE, wanted)) == [record(page, 1) for page in KEYS]


def test_export_of_one_tenant_leaves_out_the_other_and_what_is_wrong(store, folder, tmp_path):
    damage(folder, 1, "mass/0")
    told = json.loads(store("export", tmp_path / "pages", "--tenant", "acme", "--json").stdout)
    assert told == {"pages": 4, "left_out": {"checksum": 1}}
    assert json.loads(store("import", tmp_path / "pages", "--json", at=tmp_path / "other").stdout)["pages"] == 4
    assert found(tmp_path / "other", ONE).pages_with("mass/0") == (0, 2, 3)
    assert found(tmp_path / "other", TWO).names == frozenset()


def test_import_keeps_to_a_budget_and_says_what_was_refused(store, folder, tmp_path):
    store("export", tmp_path / "pages")
    ended = store("import", tmp_path / "pages", "--budget", "8KiB", at=tmp_path / "other")
    assert ended.exit_code == 1
    assert "pages refused: " in ended.stderr


def test_a_damaged_file_is_one_line_and_changes_nothing(store, shell, tmp_path):
    file = tmp_path / "pages"
    store("export", file)
    file.write_bytes(file.read_bytes()[:-3])
    ended = shell("import", file, at=tmp_path / "other")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"crossfill: {file}: is cut off"
    assert not (tmp_path / "other").exists()


def test_a_file_that_is_not_there_makes_no_store(shell, tmp_path):
    ended = shell("import", tmp_path / "nope", at=tmp_path / "other")
    assert ended.returncode == 1
    assert "cannot be read" in ended.stderr
    assert not (tmp_path / "other").exists()


def test_import_without_a_budget_evicts_nothing_whatever_the_store_holds(store, folder, tmp_path, monkeypatch):
    store("export", tmp_path / "one", "--tenant", "bolt")
    given = []
    publish = LmdbBackend.publish
    monkeypatch.setattr(LmdbBackend, "publish", lambda self, *of: given.append(of[2]) or publish(self, *of))
    at(folder, lambda s, _: s.flush(tenant="bolt"))
    assert store("import", tmp_path / "one").exit_code == 0
    # Nothing here holds more than 4 GiB, so what is seen is the bound that the backend is given.
    assert min(given[-1].budget_bytes, given[-1].tenant_bytes) >= 2**40
    assert pages_of(folder) == 8
    # The control: a budget that is given is kept.
    assert store("import", tmp_path / "one", "--budget", "1MiB").exit_code == 0
    assert given[-1] == Limits(2**20, 2**20)


def test_import_takes_one_tenant_if_asked(store, tmp_path):
    store("export", tmp_path / "pages")
    told = json.loads(store("import", tmp_path / "pages", "--tenant", "acme", "--json", at=tmp_path / "other").stdout)
    assert (told["pages"], told["left_out"]) == (4, {})
    assert found(tmp_path / "other", TWO).names == frozenset()


def test_a_full_standard_output_is_one_line(folder):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "crossfill", "store", "verify", "--url", f"lmdb://{folder}"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "crossfill: output: No space left on device"
    assert "Traceback" not in ended.stderr


def test_a_store_that_is_not_there_is_not_made(shell, crossfill, tmp_path):
    ended = shell("stats", at=tmp_path / "tpyo")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "there is no store" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "tpyo").exists()
    assert "no kind of store" in crossfill("store", "stats", "--url", "mongodb://x").stderr


def test_the_url_may_come_from_the_environment(crossfill, folder):
    ended = crossfill("store", "stats", "--json", CROSSFILL_STORE_URL=f"lmdb://{folder}")
    assert json.loads(ended.stdout)["pages"] == 8
