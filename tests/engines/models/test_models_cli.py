from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from typer.testing import CliRunner

from crossfill.models_cli import app
from engines.models import CATALOGUE, prepare
from engines.models.healing import recipe
from engines.models.healing.dataset import ANSWER_WEIGHT, every_token
from engines.models.loading import load

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None; from crossfill.models_cli import app; app(sys.argv[1:])"
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_list_names_every_model_and_what_is_here(root: Path, smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / smollm2.name).symlink_to(smollm2)
    (tmp_path / "tiny-llama").mkdir()
    status, output, _ = run("list", "--root", str(tmp_path))
    states = {line.split()[0]: line for line in output.splitlines()[1:]}
    assert status == 0
    assert set(states) == set(CATALOGUE)
    assert " yes " in states[smollm2.name]
    assert " damaged " in states["tiny-llama"]
    assert " no " in states["tiny-qwen3"]


def test_prepare_prints_the_folders(root: Path, smollm2: Path) -> None:
    status, output, _ = run("prepare", smollm2.name, "tiny-llama", "--root", str(root))
    assert status == 0
    assert output.split() == [str(smollm2), str(root / "tiny-llama")]


def test_wrong_name_is_one_line_before_anything_is_built(tmp_path: Path) -> None:
    status, output, error = run("prepare", "tiny-llama", "tiny-quen3", "--root", str(tmp_path / "models"))
    assert status == 1
    assert output == ""
    assert error.splitlines() == ["crossfill: unknown model 'tiny-quen3'; did you mean 'tiny-qwen3'?"]
    assert not (tmp_path / "models").exists()


def test_prepare_without_a_name_says_what_it_wants() -> None:
    status, _, error = run("prepare")
    assert status == 2
    assert "--demo" in error


def test_influence_draws_a_line_for_each_layer(root: Path) -> None:
    status, output, _ = run("influence", "tiny-llama", "--tokens", "32", "--root", str(root))
    assert status == 0
    assert [int(line.split()[0]) for line in output.splitlines()] == [0, 1, 2, 3]


def test_perplexity_takes_a_folder_and_layers_to_drop(root: Path) -> None:
    status, output, _ = run("perplexity", str(root / "tiny-llama"), "--drop", "1,2", "--tokens", "32")
    assert status == 0
    assert "(31 tokens)" in output
    assert run("perplexity", "tiny-llama", "--drop", "1,9", "--root", str(root))[0] == 1
    assert run("perplexity", "tiny-llama", "--drop", "one", "--root", str(root))[0] == 2


def test_judge_sets_models_beside_the_first(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "judged.json"
    quick = ("--needles", "2", "--tokens", "250", "--no-questions", "--json", str(file), "--root", str(root))
    status, output, _ = run("judge", "tiny-llama", str(root / "tiny-qwen3"), *quick)
    assert status == 0
    rows = {line.split("  ")[0]: line for line in output.splitlines()}
    assert "0 of 2 (0.00–0.66)" in rows["needle recall"]
    assert rows["perplexity, prose"].count("×") == 1
    assert "easy questions" not in rows
    written = json.loads(file.read_text())
    first, second = written["models"]
    assert (first["ratios"], first["questions"]["of"]) == (None, 0)
    quotient = second["prose"]["perplexity"] / first["prose"]["perplexity"]
    assert second["ratios"]["prose"]["value"] == pytest.approx(quotient)
    assert [answer["right"] for answer in first["recall"]["answers"]] == [False, False]
    assert written["size"]["needle_tokens"] == 250


def test_judge_refuses_what_it_could_not_finish(root: Path, tmp_path: Path) -> None:
    assert run("judge", "tiny-llama", "--json", str(tmp_path / "no" / "file"), "--root", str(root))[0] == 2
    assert run("judge", "tiny-llama", "--json", str(tmp_path), "--root", str(root))[0] == 2
    # Even root cannot write a name that is this long.
    status, output, error = run("judge", "tiny-llama", "--json", str(tmp_path / ("x" * 300)), "--root", str(root))
    assert (status, output) == (2, "")
    assert "cannot write" in error
    assert list(tmp_path.iterdir()) == []
    assert run("judge", "tiny-llama", "--tokens", "8193", "--root", str(root))[0] == 2
    assert run("judge", "tiny-llama", "tiny-llama", "--root", str(root))[0] == 2
    assert run("judge", "tiny-lama", "--root", str(root))[0] == 1


def test_judge_keeps_a_file_that_is_there_until_it_has_an_answer(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "judged.json"
    file.write_text("before")
    assert run("judge", "tiny-lama", "--json", str(file), "--root", str(root))[0] == 1
    assert file.read_text() == "before"


def test_judge_of_other_tokens_is_one_line(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(root / "tiny-llama", other)
    (other / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes() + b"\n")
    status, output, error = run("judge", "tiny-llama", str(other), "--root", str(root))
    assert (status, output) == (1, "")
    assert len(error.strip().splitlines()) == 1
    assert "another tokenizer" in error


@pytest.mark.parametrize(
    "command", [["heal", "smollm2-113m-healed"], ["choose-layers"]], ids=lambda command: command[0]
)
def test_healing_without_torch_says_what_is_missing(tmp_path: Path, command: list[str]) -> None:
    result = without_torch(*command, "--folder", str(tmp_path / "healing"))
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert "torch and transformers is needed to heal a model" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_healing_knows_a_wrong_name_without_torch() -> None:
    result = without_torch("heal", "smollm2-113m-heald")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "crossfill: unknown model 'smollm2-113m-heald'; did you mean 'smollm2-113m-healed'?"
    ]


def test_more_layers_than_can_be_searched_are_refused(tmp_path: Path) -> None:
    folder = ("--folder", str(tmp_path / "healing"))
    refused = without_torch("choose-layers", "--count", "28", *folder)
    assert refused.returncode == 2
    assert "at most 27 layers" in refused.stderr
    # The control: 27 pass this door, and stop at the next.
    assert without_torch("choose-layers", "--count", "27", *folder).returncode == 1


def test_healing_names_the_recipes_there_are(tmp_path: Path) -> None:
    status, output, error = run("heal", "tiny-llama", "--folder", str(tmp_path / "healing"))
    assert (status, output) == (1, "")
    assert "known models: smollm2-113m-healed, smollm2-99m-healed" in error
    assert list(tmp_path.iterdir()) == []


def test_choose_layers_tables_single_layers_and_sets(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = every_token(np.arange(1000, 1128, dtype=np.uint16).reshape(4, 32))
    rows.weights[:, 5:9] = ANSWER_WEIGHT
    monkeypatch.setattr(recipe, "whole_model", lambda *_: load(prepare("tiny-qwen3", root)))
    monkeypatch.setattr(recipe, "gather", lambda *_: {"conversations": rows, "exercises": rows})
    status, output, _ = run("choose-layers", "--count", "2", "--folder", str(tmp_path))
    assert status == 0
    figures = {line.split("  ")[0].strip(): line.split() for line in output.splitlines()}
    assert {"2", "3", "4"} <= figures.keys()
    assert not {"0", "1", "5"} & figures.keys()
    # What is dropped together: the cheapest alone, then that and another.
    cheapest = min(("2", "3", "4"), key=lambda layer: float(figures[layer][-1]))
    pair = next(name for name in figures if ", " in name and name[0].isdigit())
    assert cheapest in pair.split(", ")
    assert float(figures[pair][-1]) > float(figures[cheapest][-1])


def test_import_waits_for_nothing_heavy() -> None:
    code = (
        "import sys, crossfill.models_cli; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
