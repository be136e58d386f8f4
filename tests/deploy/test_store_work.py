"""Verification, export and import of whole stores, on one in memory."""

from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from cache_store.backends.memory import MemoryBackend
from cache_store.backends.protocol import Limits, PageWrite, Refusal
from cache_store.errors import ExportFileError, RecordFault
from cache_store.export_file import write_export
from cache_store.keys import PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import Kind, Record, encode
from cache_store.store import Store, scope_info
from crossfill.store_work import check_import, export_all, import_all, verify_all

PLENTY = Limits(2**30, 2**30)
TOKENS = list(range(6 * PAGE))


def namespace(tenant="acme", model="small"):
    return Namespace(tenant, model, "r1", "tokenizer", "template")


def records(of, tokens, payload=b"x" * 600):
    keys = page_keys(of.scope, tokens)
    return {
        index: [Record(Kind.MASS, layer, (2, 3), "u1", page.tokens_digest, payload) for layer in range(3)]
        for index, page in enumerate(keys)
    }


def filled(backend, *namespaces):
    store = Store(backend, PLENTY, StoreMetrics(CollectorRegistry()))
    for of in namespaces:
        store.publish(of, TOKENS, records(of, TOKENS))
    return store


def damage(backend, of, index, name):
    """Store bytes that are no record in the place of one."""
    page = page_keys(of.scope, TOKENS)[index]
    [data] = backend.read(of.scope, [(page.key, name)])
    write = PageWrite(page.key, page.parent, page.tokens_digest, {name: data[:-1] + b"!"})
    backend.publish(scope_info(of), [write], PLENTY)


class Told:
    """The steps that a command showed."""

    def __init__(self):
        self.steps = []

    def __call__(self, stage, done, total):
        self.steps.append((stage, done, total))


def quiet(*_):
    pass


def bring(backend, file, limits=PLENTY, *, progress=quiet, **wanted):
    """Import a file as the command does."""
    return import_all(backend, check_import(file, wanted, progress=progress), limits, progress=progress)


def test_verify_reads_all_and_finds_what_is_wrong():
    backend, told = MemoryBackend(), Told()
    store = filled(backend, namespace(), namespace("other"))
    sound = verify_all(backend, repair=False, progress=told)
    assert (sound.pages, sound.records, sound.faults) == (12, 36, [])
    assert told.steps == [("verify", 12, 12)]
    damage(backend, namespace(), 2, "mass/1")
    for _ in range(2):
        [fault] = verify_all(backend, repair=False, progress=quiet).faults
    assert (fault.key, fault.name) == (page_keys(namespace().scope, TOKENS)[2].key, "mass/1")
    assert (fault.fault, fault.removed) == (RecordFault.CHECKSUM, False)
    assert store.match(namespace(), TOKENS).pages_with("mass/1") == tuple(range(6))


def test_repair_takes_away_what_is_wrong_and_nothing_else():
    backend = MemoryBackend()
    store = filled(backend, namespace())
    damage(backend, namespace(), 2, "mass/1")
    assert [fault.removed for fault in verify_all(backend, repair=True, progress=quiet).faults] == [True]
    assert verify_all(backend, repair=False, progress=quiet).faults == []
    found = store.match(namespace(), TOKENS)
    assert found.pages_with("mass/1") == (0, 1, 3, 4, 5)
    assert found.contiguous_pages("mass/0") == 6
    assert backend.stats().quarantined == 1


@pytest.mark.parametrize("name", ["pages", "pages.zst"])
def test_what_is_exported_from_one_store_is_served_by_another(tmp_path, name):
    backend, other = MemoryBackend(), MemoryBackend()
    store = filled(backend, namespace(), namespace("other"))
    assert export_all(backend, tmp_path / name, {}, progress=quiet).pages == 12
    told = Told()
    result = bring(other, tmp_path / name, progress=told)
    assert (result.pages, dict(result.refused), result.evicted_pages) == (12, {}, 0)
    assert told.steps[-1] == ("import", 12, 12)
    second = filled(other)
    for of in (namespace(), namespace("other")):
        found = second.match(of, TOKENS)
        assert found == store.match(of, TOKENS)
        wanted = [(page, "mass/2") for page in found.pages]
        assert second.read(of, wanted) == store.read(of, wanted)
        assert None not in second.read(of, wanted)
    assert second.match(namespace("third"), TOKENS).names == frozenset()


def test_an_export_has_what_was_asked_for_without_what_is_wrong(tmp_path):
    backend, other = MemoryBackend(), MemoryBackend()
    filled(backend, namespace(), namespace("other"), namespace("acme", "large"))
    damage(backend, namespace(), 0, "mass/1")
    damage(backend, namespace("other"), 0, "mass/1")
    result = export_all(backend, tmp_path / "pages", {"tenant": "acme", "model": "small"}, progress=quiet)
    assert (result.pages, dict(result.left_out)) == (6, {RecordFault.CHECKSUM: 1})
    bring(other, tmp_path / "pages")
    store = filled(other)
    assert store.match(namespace(), TOKENS).pages_with("mass/1") == (1, 2, 3, 4, 5)
    assert store.match(namespace(), TOKENS).contiguous_pages("mass/0") == 6
    assert store.match(namespace("other"), TOKENS).names == frozenset()


def test_of_a_damaged_file_nothing_is_imported(tmp_path):
    backend, other, file = MemoryBackend(), MemoryBackend(), tmp_path / "pages"
    filled(backend, namespace())
    export_all(backend, file, {}, progress=quiet)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ExportFileError, match="altered"):
        bring(other, file)
    assert verify_all(other, repair=False, progress=quiet).pages == 0
    file.write_bytes(content)
    assert bring(other, file).pages == 6


def test_pages_that_the_store_refuses_are_told(tmp_path):
    backend, other, file = MemoryBackend(), MemoryBackend(), tmp_path / "pages"
    filled(backend, namespace())
    export_all(backend, file, {}, progress=quiet)
    all_bytes = backend.stats().size_bytes
    into = partial(bring, other, file)
    result = into(Limits(all_bytes // 2, all_bytes))
    assert 0 < result.pages < 6
    assert result.refused[Refusal.FULL] == 6 - result.pages
    assert into(Limits(all_bytes, all_bytes)).refused == {}


def crafted(tmp_path, **records):
    """A file that claims a page of a tenant, with these bytes as its records `mass/0`, …"""
    page = page_keys(namespace().scope, TOKENS)[0]
    named = {name.replace("_", "/"): data for name, data in records.items()}
    write_export(
        tmp_path / "crafted",
        [(scope_info(namespace()), PageWrite(page.key, page.parent, page.tokens_digest, named))],
    )
    return tmp_path / "crafted"


def test_records_that_are_not_intact_are_left_out_of_an_import_and_counted(tmp_path):
    [sound, other, _] = records(namespace(), TOKENS)[0]
    file = crafted(tmp_path, mass_0=encode(sound), mass_1=encode(other)[:-1] + b"!", mass_2=encode(sound))
    backend = MemoryBackend()
    result = bring(backend, file)
    assert (result.pages, dict(result.left_out)) == (1, {RecordFault.CHECKSUM: 1, RecordFault.KIND: 1})
    assert filled(backend).match(namespace(), TOKENS).names == {"mass/0"}
    assert verify_all(backend, repair=False, progress=quiet).faults == []


def test_an_import_takes_what_was_asked_for(tmp_path):
    backend, other, file = MemoryBackend(), MemoryBackend(), tmp_path / "pages"
    filled(backend, namespace(), namespace("other"), namespace("acme", "large"))
    export_all(backend, file, {}, progress=quiet)
    assert bring(other, file, tenant="acme", model="small").pages == 6
    store = filled(other)
    assert store.match(namespace(), TOKENS).contiguous_pages("mass/0") == 6
    for left in (namespace("other"), namespace("acme", "large")):
        assert store.match(left, TOKENS).names == frozenset()
