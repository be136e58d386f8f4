import json
import os
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store import export_file
from cache_store.backends.protocol import PageWrite, ScopeInfo
from cache_store.errors import ExportFileError
from cache_store.export_file import MAGIC, read_export, write_export

# How long an example takes is not what is tested.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ONE = ScopeInfo(b"1" * 16, "acme", "small", "r1")
TWO = ScopeInfo(b"2" * 16, "ünder é", "small", "")


def page(number, **records):
    return PageWrite(bytes([number]) * 16, b"p" * 16, bytes([number]) * 32, records)


PAGES = [(ONE, page(1, a=b"x" * 5000, b=b"")), (ONE, page(2)), (TWO, page(3, c=b"\x00\xff")), (ONE, page(4, d=b"y"))]


@pytest.mark.parametrize("name", ["pages", "pages.zst"])
def test_what_was_written_is_read(tmp_path, name):
    file = tmp_path / name
    assert write_export(file, iter(PAGES)) == 4
    assert list(read_export(file)) == PAGES
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert file.read_bytes().startswith(MAGIC) == (name == "pages")


def test_a_compressed_file_is_known_by_its_content(tmp_path):
    write_export(tmp_path / "pages.zst", PAGES)
    assert list(read_export((tmp_path / "pages.zst").rename(tmp_path / "pages"))) == PAGES


def test_nothing_is_an_export_too(tmp_path):
    assert write_export(tmp_path / "none", []) == 0
    assert list(read_export(tmp_path / "none")) == []


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("export") / "pages"
    write_export(file, [(ONE, page(1, a=b"abc")), (TWO, page(2, b=b"def"))])
    return file


@UNHURRIED
@given(data=st.data())
def test_any_altered_byte_is_refused(written, data):
    content = bytearray(written.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    altered = written.with_name("altered")
    altered.write_bytes(content)
    with pytest.raises(ExportFileError):
        list(read_export(altered))
    assert len(list(read_export(written))) == 2


@UNHURRIED
@given(data=st.data())
def test_any_shortened_file_is_refused(written, data):
    content = written.read_bytes()
    short = written.with_name("short")
    short.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ExportFileError):
        list(read_export(short))


def test_a_frame_that_is_left_out_or_stands_elsewhere_is_refused(tmp_path):
    file = tmp_path / "pages"
    write_export(file, [(ONE, page(1)), (ONE, page(2))])
    content = file.read_bytes()
    size = 5 + 66 + 16
    first = content.index(bytes([1]) * 16) - 5
    before, one, two, after = (
        *(content[:first], content[first : first + size]),
        *(content[first + size : first + 2 * size], content[first + 2 * size :]),
    )
    assert before + one + two + after == content
    for altered in (before + two + one + after, before + one + after, before + one + one + two + after, content + b"x"):
        file.write_bytes(altered)
        with pytest.raises(ExportFileError, match=r"altered|ends"):
            list(read_export(file))


def test_a_damaged_compressed_file_is_one_line(tmp_path):
    file = tmp_path / "pages.zst"
    write_export(file, PAGES)
    content = file.read_bytes()
    for damaged in (content[:-10], content[:20] + b"\x00" * 8 + content[28:]):
        file.write_bytes(damaged)
        with pytest.raises(ExportFileError) as caught:
            list(read_export(file))
        assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_none_or_cannot_be(tmp_path):
    (tmp_path / "text").write_text("something else, and long enough to be a file")
    with pytest.raises(ExportFileError, match="is no export"):
        list(read_export(tmp_path / "text"))
    with pytest.raises(ExportFileError, match=r"absent: cannot be read: No such file"):
        list(read_export(tmp_path / "absent"))
    with pytest.raises(ExportFileError, match=r"cannot be written: No such file"):
        write_export(tmp_path / "none" / "file", PAGES)


def test_a_failure_on_the_way_leaves_the_file_that_was_there(tmp_path):
    file = tmp_path / "pages"
    write_export(file, PAGES)

    def breaks():
        yield PAGES[0]
        raise RuntimeError("the store went away")

    with pytest.raises(RuntimeError):
        write_export(file, breaks())
    assert list(read_export(file)) == PAGES
    assert [path.name for path in tmp_path.iterdir()] == ["pages"]


def test_without_zstandard_it_says_so(tmp_path, monkeypatch):
    write_export(tmp_path / "pages.zst", PAGES)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ExportFileError, match=r"without \.zst"):
        write_export(tmp_path / "other.zst", PAGES)
    with pytest.raises(ExportFileError, match="needs the package zstandard"):
        list(read_export(tmp_path / "pages.zst"))
    write_export(tmp_path / "plain", PAGES)
    assert list(read_export(tmp_path / "plain")) == PAGES


def forged(file, scope, *pages):
    """A file with right checksums, as whoever has the source can make one."""
    content, checksum = MAGIC, b""
    scope_data = json.dumps({"scope": "31" * 16, "tenant": "acme", "model": "small", "revision": "r1"} | scope).encode()
    frames = [(1, scope_data), *((2, export_file._pack_page(page)) for page in pages)]
    for kind, data in [*frames, (3, len(pages).to_bytes(8, "little"))]:
        checksum = export_file._checksum(checksum, kind, data)
        content += bytes([kind]) + len(data).to_bytes(4, "little") + data + checksum
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    "scope",
    [
        {"tenant": 5},
        {"model": ["small"]},
        {"revision": None},
        {"tenant": "\ud800"},
        {"tenant": "a\x1b[2J"},
        {"scope": ""},
        {"scope": "aabbcc"},
        {"scope": "31" * 17},
        {"scope": 7},
    ],
    ids=str,
)
def test_a_namespace_that_no_store_should_be_given_is_refused(tmp_path, scope):
    with pytest.raises(ExportFileError, match="cannot be understood"):
        list(read_export(forged(tmp_path / "forged", scope, page(1))))
    # The control: the same way of forging gives a page.
    assert list(read_export(forged(tmp_path / "forged", {}, page(1)))) == [(ONE, page(1))]


def test_a_page_that_is_its_own_parent_is_refused(tmp_path):
    with pytest.raises(ExportFileError, match="its own parent"):
        list(read_export(forged(tmp_path / "forged", {}, PageWrite(b"p" * 16, b"p" * 16, b"d" * 32, {}))))


def test_what_could_not_be_imported_is_not_exported(tmp_path, monkeypatch):
    odd = ScopeInfo(b"1" * 16, "line\nbreak", "small", "r1")
    with pytest.raises(ExportFileError, match="printable"):
        write_export(tmp_path / "file", [(odd, page(1))])
    monkeypatch.setattr(export_file, "_MOST_FRAME_BYTES", 1000)
    with pytest.raises(ExportFileError, match="more than an export can hold"):
        write_export(tmp_path / "file", [(ONE, page(1, a=b"x" * 1000))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["pages", "pages.zst"])
def test_a_frame_that_claims_too_much_is_refused_before_it_is_read(tmp_path, monkeypatch, name):
    write_export(tmp_path / name, [(ONE, page(1, a=bytes(5000)))])
    asked, read_whole = [], export_file._read_whole
    monkeypatch.setattr(
        export_file, "_read_whole", lambda path, file, size: asked.append(size) or read_whole(path, file, size)
    )
    monkeypatch.setattr(export_file, "_MOST_FRAME_BYTES", 4000)
    with pytest.raises(ExportFileError, match="altered"):
        list(read_export(tmp_path / name))
    assert max(asked) < 4000
    monkeypatch.setattr(export_file, "_MOST_FRAME_BYTES", 2**28)
    assert len(list(read_export(tmp_path / name))) == 1


def test_a_frame_may_have_a_quarter_of_a_gigabyte():
    assert export_file._MOST_FRAME_BYTES == 256 * 2**20


@pytest.mark.parametrize("kind", ["fifo", "link", "broken link"])
def test_what_is_there_and_no_regular_file_is_not_replaced(tmp_path, kind):
    path, target = tmp_path / "pages", tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("precious")
    with pytest.raises(ExportFileError, match="no regular file"):
        write_export(path, PAGES)
    assert path.is_fifo() == (kind == "fifo")
    assert path.is_symlink() == (kind != "fifo")
    assert target.exists() == (kind == "link")
