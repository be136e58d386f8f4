"""Which model lies in a folder: whatever changes what its attention would be changes its identity."""

import json

import pytest

from engines.errors import ModelIdentityError
from engines.reuse.identity import read_identity

CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    return tmp_path


def parts(folder):
    identity = read_identity("m", folder)
    return identity.revision, identity.tokenizer, identity.template


def test_an_identity_is_of_the_content_and_not_of_the_place(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert read_identity("m", other) == read_identity("m", folder)
    assert (read_identity("m", folder).layers, read_identity("m", folder).heads) == (4, 2)


@pytest.mark.parametrize("at", [0, 100, 500_000, 4096 * 256 - 1])
def test_other_weights_are_another_revision(folder, at):
    before = parts(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[at] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    after = parts(folder)
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_a_tensor_that_lies_between_the_samples_of_its_file_counts(folder):
    # 64 samples of 64 KiB are 8 MiB apart here; the second tensor lies between two of them.
    begin, end, whole = 10 * 2**20, 10 * 2**20 + 4096, 512 * 2**20
    header = json.dumps({"a": {"data_offsets": [0, begin]}, "b": {"data_offsets": [begin, end]}, "__metadata__": {}})
    path = folder / "model.safetensors"

    def write(value):
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.seek(8 + len(header) + begin)
            file.write(bytes([value]) * (end - begin))
            file.truncate(whole)

    write(1)
    before = parts(folder)
    write(2)
    assert parts(folder)[0] != before[0]


@pytest.mark.parametrize(
    "header", [b"{", b"[1]", b'{"a": 7}', b'{"a": {"data_offsets": [1]}}', b'{"a": {"data_offsets": [0, 99999]}}']
)
def test_weights_with_a_header_that_tells_nothing_are_sampled_all_the_same(folder, header):
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"w" * 100)
    before = parts(folder)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"v" * 100)
    assert parts(folder)[0] != before[0]


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("config.json", 0),
        ("tokenizer.json", 1),
        ("chat_template.jinja", 2),
    ],
)
def test_each_file_changes_its_own_part(folder, file, changed):
    before = parts(folder)
    (folder / file).write_text(json.dumps({**CONFIG, "rope_theta": 7.0}))
    after = parts(folder)
    assert [one != other for one, other in zip(before, after, strict=True)] == [i == changed for i in range(3)]


def test_a_language_model_within_a_larger_one_is_found(folder):
    (folder / "config.json").write_text(json.dumps({"text_config": CONFIG, "vision_config": {}}))
    assert read_identity("m", folder).layers == 4


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "no usable config.json"),
        ("config.json", "{", "no usable config.json"),
        ("config.json", "{}", "tells no num_hidden_layers"),
        ("model.safetensors", None, "no weights"),
    ],
    ids=["no config", "broken config", "empty config", "no weights"],
)
def test_a_folder_that_does_not_say_is_refused(folder, file, content, said):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ModelIdentityError, match=said):
        read_identity("m", folder)
