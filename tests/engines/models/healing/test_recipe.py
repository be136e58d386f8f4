from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engines.models import adapter_file
from engines.models.healing import dataset, recipe, sampling
from engines.models.healing.plan import Plan, Recipe, Stage, TextSize
from engines.models.healing.recipe import fast_dtype, gather, heal, run
from engines.models.healing.student import make_student
from engines.models.healing.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engines.models.healing.loss import Losses
    from engines.models.loading import LoadedModel
    from engines.models.progress import Progress

SIZE = TextSize(conversations=4, document_tokens=1100, exercises=3, long_exercises=2)
KINDS = {"conversations", "documents", "exercises", "long"}
TALK_TOKENS = 40
PLAN = Plan((Stage((1,), 12),), 4, 64, 16, 1e-2, warmup_steps=2, fade_steps=2)


@pytest.fixture
def sampled(library: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of all batches of conversations, which are few and short here; documents are three."""
    for number in range(3):
        sentences = [f"Sentence {line} of text {number} has about as many words as others." for line in range(60)]
        (library / f"m{number}.py").write_text(f'"""{" ".join(sentences)}"""')
    seen: list[int] = []
    real = sampling.converse

    def converse(loaded: LoadedModel, rows: int, *, seed: int, progress: Progress) -> np.ndarray[Any, Any]:
        seen.append(seed)
        return real(loaded, rows, seed=seed, length=TALK_TOKENS, progress=progress)

    monkeypatch.setattr(sampling, "BATCH_ROWS", 2)
    monkeypatch.setattr(sampling, "converse", converse)
    return seen


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def same(one: dict[str, dataset.Rows], other: dict[str, dataset.Rows]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(rows.ids, other[kind].ids) and np.array_equal(rows.weights, other[kind].weights)
        for kind, rows in one.items()
    )


def test_text_has_four_kinds_of_the_sizes_asked_for(whole: LoadedModel, sampled: list[int], tmp_path: Path) -> None:
    kinds = gather(whole, SIZE, tmp_path / "text")
    shapes = {kind: rows.ids.shape for kind, rows in kinds.items()}
    # Of the exercises, those that fit.
    assert shapes["conversations"] == (4, TALK_TOKENS)
    assert shapes["documents"] == (2, 512)
    assert 1 <= shapes["exercises"][0] <= 3
    assert 1 <= shapes["long"][0] <= 2
    assert (shapes["exercises"][1], shapes["long"][1]) == (512, 1024)
    assert shapes.keys() == KINDS
    weights = {kind: set(np.unique(rows.weights).tolist()) for kind, rows in kinds.items()}
    assert weights["conversations"] == weights["documents"] == {0, 1}
    assert weights["exercises"] == weights["long"] == {0, 1, dataset.ANSWER_WEIGHT}
    assert sampled == [7, 9]


def test_text_is_made_once(
    whole: LoadedModel, sampled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gather(whole, SIZE, tmp_path / "text")
    monkeypatch.setattr(sampling, "converse", stop)
    monkeypatch.setattr(recipe.corpus, "documents", stop)
    assert same(gather(whole, SIZE, tmp_path / "text"), first)
    with pytest.raises(KeyboardInterrupt):
        gather(whole, SIZE, tmp_path / "other")


def test_conversations_that_were_sampled_before_an_interruption_are_kept(
    whole: LoadedModel, sampled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gather(whole, SIZE, tmp_path / "whole")
    real = sampling.converse

    def second_fails(*arguments: Any, seed: int, **options: Any) -> np.ndarray[Any, Any]:
        if seed == 9:
            raise KeyboardInterrupt
        return real(*arguments, seed=seed, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "converse", second_fails)
        with pytest.raises(KeyboardInterrupt):
            gather(whole, SIZE, tmp_path / "parts")
    assert not list((tmp_path / "parts").glob("text-*.npz"))
    sampled.clear()
    assert same(gather(whole, SIZE, tmp_path / "parts"), expected)
    assert sampled == [9]


def test_another_size_of_text_is_made_anew_beside_the_first(
    whole: LoadedModel, sampled: list[int], tmp_path: Path
) -> None:
    first = gather(whole, SIZE, tmp_path)
    sampled.clear()
    other = gather(whole, replace(SIZE, seed=20), tmp_path)
    assert sampled[0] == 20
    assert not same(first, other)
    sampled.clear()
    assert same(gather(whole, SIZE, tmp_path), first)
    assert sampled == []


@pytest.mark.parametrize("kind", ["conversations", "document_tokens", "exercises", "long_exercises"])
def test_text_without_one_kind_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="every kind"):
        replace(SIZE, **{kind: 0})


@pytest.fixture
def begin(whole: LoadedModel, duplicate: Callable[[], LoadedModel], tmp_path: Path) -> Callable[[str], Training]:
    """A training of twelve steps that goes on in the folder of that name."""
    rows = dataset.every_token(np.arange(1000, 1128, dtype=np.uint16).reshape(4, 32))
    return lambda name: Training(make_student(duplicate(), PLAN.rank, 0), whole, {"text": rows}, PLAN, tmp_path / name)


def log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text(encoding="utf-8").splitlines()]


def test_run_logs_mean_losses_and_ends_with_a_checkpoint(
    begin: Callable[[str], Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, shown = begin("run"), []
    made: list[Losses] = []
    real = training.step

    def step() -> Losses:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(training, "step", step)
    run(training, PLAN, tmp_path / "run", lambda _text, done, total: shown.append((done, total)))
    assert shown == [(number, 12) for number in range(1, 13)]
    first, second = log(tmp_path / "run")
    for line, number, steps in ((first, 10, made[:10]), (second, 12, made[10:])):
        assert line == {
            "step": number,
            "divergence": pytest.approx(np.mean([one.divergence for one in steps]), abs=1e-5),
            "distance": pytest.approx(np.mean([one.distance for one in steps]), abs=1e-5),
        }
    assert first["divergence"] != second["divergence"]
    assert begin("run").done


def test_run_goes_on_from_its_last_checkpoint(
    begin: Callable[[str], Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_at_five(_text: str, done: int, _total: int | None) -> None:
        if done == 5:
            raise KeyboardInterrupt

    run(begin("whole"), PLAN, tmp_path / "whole")
    # No wait between checkpoints.
    monkeypatch.setattr(recipe, "_CHECKPOINT_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run(begin("parts"), PLAN, tmp_path / "parts", stop_at_five)
    training = begin("parts")
    assert training.steps_done == 4
    run(training, PLAN, tmp_path / "parts")
    one, other = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["parameters"] for name in ("whole", "parts")
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert [line["step"] for line in log(tmp_path / "parts")] == [10, 12]


def test_run_keeps_no_checkpoint_before_its_time(begin: Callable[[str], Training], tmp_path: Path) -> None:
    def stop_at_five(_text: str, done: int, _total: int | None) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(begin("run"), PLAN, tmp_path / "run", stop_at_five)
    assert begin("run").steps_done == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_healing_writes_an_adapter_of_its_base_and_writes_it_again(
    dtype: torch.dtype,
    tiny: Path,
    root: Path,
    sampled: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe, "fast_dtype", lambda: dtype)
    plan = Plan((Stage((2,), 2),), 4, 40, 8, 1e-2, warmup_steps=1, fade_steps=2)
    chosen = Recipe(plan, SIZE, "tiny-llama")
    path = heal("small", chosen, root, tmp_path / "out")
    adapter = adapter_file.read(path)
    assert adapter.base == "tiny-llama"
    assert adapter.base_sha256 == hashlib.sha256((tiny / "model.safetensors").read_bytes()).hexdigest()
    assert adapter.dropped_layers == (2,)
    assert any(factors.up.any() for factors in adapter.matrices.values())
    provenance = json.loads(adapter.provenance)
    assert provenance.pop("torch") == torch.__version__
    assert provenance == json.loads(json.dumps(asdict(chosen)))
    # The same from the checkpoint, without another step.
    data = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(Training, "step", stop)
    assert heal("small", chosen, root, tmp_path / "out").read_bytes() == data


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", torch.bfloat16),
        ("flags\t\t: fpu amx_bf16", torch.bfloat16),
        ("Features\t: asimd bf16 i8mm", torch.bfloat16),
        ("flags\t\t: fpu avx2 avx512f", torch.float32),
        ("flags\t\t: fpu avx512_bf16x", torch.float32),
        (None, torch.float32),
    ],
)
def test_fast_dtype_is_bfloat16_where_the_processor_multiplies_it(
    flags: str | None, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cpuinfo"
    if flags is not None:
        place.write_text(f"processor\t: 0\n{flags}\n")
    monkeypatch.setattr(recipe, "Path", lambda _path: place)
    assert fast_dtype() is expected
