"""The docs check finds what it is there to find."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "deploy" / "check_docs.py"


@pytest.fixture
def check(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("check_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "router").mkdir()
    (tmp_path / "Makefile").write_text("run:\n\ttrue\n")
    return module


def test_a_module_that_the_architecture_page_forgot(check, tmp_path):
    (tmp_path / "router/new.py").write_text("")
    page = tmp_path / "docs/architecture.md"
    page.write_text("`router/old.py`")
    assert list(check._unnamed_modules()) == ["docs/architecture.md does not name `router/new.py`"]
    assert list(check._dead_paths(page)) == ["docs/architecture.md: names router/old.py, which does not exist"]
    page.write_text("`router/new.py`")
    assert not list(check._unnamed_modules())
    assert not list(check._dead_paths(page))


def test_a_dead_link_and_a_command_that_is_none(check, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[here](gone.md) `make run` `make dance` `crossfill up` `crossfill fly`")
    assert list(check._dead_links(page)) == ["page.md: link to gone.md, which does not exist"]
    assert list(check._unknown_commands(page)) == [
        "page.md: make dance is no target",
        "page.md: crossfill fly is no command",
    ]


def test_a_setting_without_documentation(check, tmp_path):
    (tmp_path / "docs/configuration.md").write_text("`tau`")
    missing = list(check._undocumented_keys())
    assert "docs/configuration.md does not have the key `sigma`" in missing
    assert not any("`tau`" in line for line in missing)


def test_a_file_and_a_function_that_grew_too_long(check, tmp_path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    pass\n" * 400)
    assert list(check._too_long(path)) == [
        "long.py: 401 lines, more than 400",
        "long.py:1: f has 401 lines, more than 60",
    ]
