import re
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import date

import pytest

from crossfill.errors import KeysError
from crossfill.keys_file import add_key, revoke_key
from router.errors import ConfigError
from router.tenants.key_file import read_keys, sha256_of
from router.tenants.keyring import Keyring

TODAY = date(2026, 1, 31)


def add(path, tenant="acme", label=""):
    return add_key(path, tenant, label, TODAY)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys"


def test_add_prints_the_key_alone_and_keeps_only_its_hash(crossfill, file):
    ended = crossfill("keys", "add", "acme", "--file", file, "--label", "build server")
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"cf-[A-Za-z0-9_-]{43}\n", ended.stdout)
    key = ended.stdout.strip()
    assert key not in ended.stderr
    assert key not in file.read_text()
    [entry] = read_keys(file)
    assert (entry.tenant, entry.sha256, entry.label) == ("acme", sha256_of(key.encode()), "build server")
    assert Keyring(file).owner_of(key.encode()) == "acme"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_admin_key_can_be_told_from_a_clients_by_its_beginning(crossfill, file):
    ended = crossfill("keys", "add", "ada", "--admin", "--file", file)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"cf-admin-[A-Za-z0-9_-]{43}\n", ended.stdout)
    assert "The admin key" in ended.stderr
    assert file.read_text().startswith("# Admin keys of a Crossfill router: OPERATOR ")
    [entry] = read_keys(file)
    assert (entry.tenant, entry.sha256) == ("ada", sha256_of(ended.stdout.strip().encode()))
    refused = crossfill("keys", "add", "a/b", "--admin", "--file", file)
    assert "not an operator's name: 'a/b'" in refused.stderr


def test_list_shows_tenant_id_date_and_label_and_no_hash(crossfill, file):
    _, first = add(file, "acme", "build [server]")
    _, second = add(file, "b")
    shown = crossfill("keys", "list", "--file", file).stdout
    assert [line.split() for line in shown.splitlines()] == [
        ["tenant", "id", "created", "label"],
        ["acme", first.id, "2026-01-31", "build", "[server]"],
        ["b", second.id, "2026-01-31"],
    ]
    assert first.sha256 not in shown


def test_revoke_takes_out_one_key_and_nothing_else(crossfill, file):
    file.write_text("# ours\n\n")
    (_, first), (other, second) = add(file), add(file, "b", "kept")
    ended = crossfill("keys", "revoke", first.id, "--file", file)
    assert (ended.returncode, ended.stdout) == (0, f"revoked {first.id} of acme\n")
    assert file.read_text() == "# ours\n\n" + second.to_line()
    assert Keyring(file).owner_of(other.encode()) == "b"
    again = crossfill("keys", "revoke", first.id, "--file", file)
    assert again.returncode == 1
    assert f"has no key with the id {first.id!r}" in again.stderr


def test_the_last_key_can_be_revoked_and_that_is_said(crossfill, file):
    _, entry = add(file)
    ended = crossfill("keys", "revoke", entry.id, "--file", file)
    assert ended.returncode == 0
    assert "nobody may use the router" in ended.stderr
    assert read_keys(file) == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "a/b"), "not a tenant name: 'a/b'"),
        (("add", "acme", "--label", "two\nlines"), "a label is one line of at most 100 characters"),
        (("add", "acme", "--label", "x" * 101), "a label is one line of at most 100 characters"),
        (("list",), "keys: cannot be read: No such file"),
        (("revoke", "0123456789ab"), "keys: cannot be read: No such file"),
    ],
    ids=["tenant", "label with a line break", "long label", "list nothing", "revoke in nothing"],
)
def test_a_mistake_is_one_line_and_changes_nothing(crossfill, file, arguments, message):
    ended = crossfill("keys", *arguments, "--file", file)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not ended.stdout
    assert not file.exists()


def test_a_file_with_a_fault_is_left_as_it_is(file):
    file.write_text("nonsense\n")
    with pytest.raises(ConfigError, match=r"keys:1: not a key"):
        add(file)
    with pytest.raises(ConfigError, match=r"keys:1: not a key"):
        revoke_key(file, "0123456789ab")
    assert file.read_text() == "nonsense\n"


def test_the_folder_is_made(tmp_path):
    file = tmp_path / "none" / "yet" / "keys"
    _, entry = add(file)
    assert read_keys(file) == (entry,)


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KeysError, match=r"file/below: cannot be made: Not a directory"):
        add(tmp_path / "file" / "below" / "keys")


def test_a_last_line_without_an_end_is_kept_whole(file):
    _, entry = add(file)
    file.write_text(entry.to_line().rstrip("\n"))
    _, new = add(file)
    assert read_keys(file) == (entry, new)


def test_who_could_read_the_file_still_can(file):
    add(file)
    file.chmod(0o640)
    add(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path, file):
    real = tmp_path / "real"
    file.symlink_to(real)
    add(file)
    add(file)
    assert file.is_symlink()
    assert len(read_keys(real)) == 2


def test_many_at_once_lose_nothing_and_a_reader_always_finds_a_whole_file(file):
    add(file)
    counts = []
    with ThreadPoolExecutor(8) as pool:
        adding = [pool.submit(add, file, f"t{number}") for number in range(40)]
        while not all(future.done() for future in adding):
            counts.append(len(read_keys(file)))
    keys = [future.result()[0] for future in adding]
    assert len(set(keys)) == 40
    assert len(read_keys(file)) == 41
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert {path.name for path in file.parent.iterdir()} == {".keys.lock", "keys"}
