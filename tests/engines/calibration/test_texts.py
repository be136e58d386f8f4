"""Texts of a calibration: dealt out so that none is used for two purposes, and refused where they are too few."""

import json

import pytest

from engines.calibration.texts import Purpose, Source, built_in, cut, read_sources
from engines.errors import CalibrationDataError
from engines.models import prepare
from engines.models.loading import load


@pytest.fixture(scope="module")
def tokenizer(models_root):
    return load(prepare("tiny-llama", models_root)).tokenizer


def test_what_comes_with_python_is_there_for_every_purpose_and_for_one_only():
    sources = built_in()
    assert {source.purpose for source in sources} == set(Purpose)
    assert sum(source.purpose is Purpose.GATE for source in sources) == 2
    documents = [document for source in sources for document in source.documents]
    assert len(set(documents)) == len(documents)
    # Topics repeat paragraphs of others.
    paragraphs = [part for source in sources[:3] for document in source.documents for part in document.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs) > 500


def write_lines(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_own_documents_are_dealt_out_by_what_they_say(tmp_path, tokenizer, kind):
    documents = [f"document {number}" for number in range(40)]
    path = tmp_path / f"data.{kind}"
    if kind == "txt":
        path.write_text("\n\n".join(documents))
    else:
        write_lines(path, [{"text": document} for document in documents])
    sources = {source.purpose: set(source.documents) for source in read_sources(path, tokenizer)}
    assert [len(sources[purpose]) for purpose in Purpose] == [20, 8, 12]
    assert set.union(*sources.values()) == set(documents)
    path.write_text("\n\n".join(reversed(documents))) if kind == "txt" else None
    again = {source.purpose: set(source.documents) for source in read_sources(path, tokenizer)}
    assert again == sources


def test_messages_are_put_into_the_chat_template(tmp_path, tokenizer):
    lines = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(10)]
    sources = read_sources(write_lines(tmp_path / "data.jsonl", lines), tokenizer)
    documents = [document for source in sources for document in source.documents]
    assert all("<|im_start|>user\nquestion" in document for document in documents)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": "a"}\n{"text": 1}', ":2: want an object"),
        ("{", ":1: not JSON"),
        ("[" * 100_000, ":1: not JSON"),
        (r'{"text": "\ud800"}', ":1: not JSON of text"),
        ('{"messages": []}', ":1: want an object"),
        ('{"messages": [{"content": "x"}]}', ":1: the chat template refuses"),
        ('{"text": "a"}', "has 1 different documents, ten are needed"),
        ("\n".join(['{"text": "a"}'] * 20), "has 1 different documents, ten are needed"),
        ("\n".join(['{"text": ""}'] * 20), "has 0 different documents, ten are needed"),
    ],
)
def test_lines_that_cannot_be_used_are_said(tmp_path, tokenizer, text, said):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(CalibrationDataError, match=said):
        read_sources(path, tokenizer)


def test_a_document_that_is_there_twice_is_used_for_one_purpose(tmp_path, tokenizer):
    lines = [{"text": f"document {number:02}"} for number in range(20)]
    path = write_lines(tmp_path / "data.jsonl", [*lines, *[lines[0]] * 30])
    documents = [document for source in read_sources(path, tokenizer) for document in source.documents]
    assert sorted(documents) == [line["text"] for line in lines]


def test_of_a_conversation_that_goes_on_only_the_whole_is_used(tmp_path, tokenizer):
    turns = [
        [{"role": role, "content": f"talk {talk}, turn {turn}"} for turn in range(3) for role in ("user", "assistant")]
        for talk in range(12)
    ]
    lines = [{"messages": talk[:turn]} for talk in turns for turn in (2, 4, 6)]
    sources = read_sources(write_lines(tmp_path / "data.jsonl", lines), tokenizer)
    documents = [document for source in sources for document in source.documents]
    assert len(documents) == 12
    assert all("turn 2" in document for document in documents)


@pytest.mark.parametrize("name", ["data.jsonl", "DATA.JSONL"])
def test_line_ends_within_strings_and_of_other_systems_are_no_fault(tmp_path, tokenizer, name):
    texts = [f"document {number}\u2028\u0085 goes on" for number in range(10)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, ""]).encode())
    sources = read_sources(tmp_path / name, tokenizer)
    assert sorted(document for source in sources for document in source.documents) == texts


def test_a_file_that_is_no_text_is_said(tmp_path, tokenizer):
    (tmp_path / "data.txt").write_bytes(b"\xff")
    for name in ("data.txt", "missing.txt"):
        with pytest.raises(CalibrationDataError, match="cannot be read as UTF-8"):
            read_sources(tmp_path / name, tokenizer)


def test_texts_are_equally_long_and_follow_one_another(tokenizer):
    source = Source(Purpose.FIT, "own", tuple(f"document {number} says nothing new" for number in range(50)))
    passages = cut(source, tokenizer, tokens=64, count=3, seed=0)
    assert [len(text) for text in passages.texts] == [64] * 3
    assert len(set(passages.texts)) == 3
    assert cut(source, tokenizer, tokens=64, count=3, seed=0) == passages
    other = cut(source, tokenizer, tokens=64, count=3, seed=1)
    assert other.digest != passages.digest
    assert cut(source, tokenizer, tokens=32, count=6, seed=0).digest != passages.digest


def test_a_source_that_is_too_short_is_said(tokenizer):
    source = Source(Purpose.CHOICE, "own", ("a few words",))
    with pytest.raises(CalibrationDataError, match=r"own: has \d+ tokens for `choice`, 2 texts of 64 are needed"):
        cut(source, tokenizer, tokens=64, count=2, seed=0)
