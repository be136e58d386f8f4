"""A run that heals a model, from its text to its adapter file.

Everything lies in one folder and every step of it is skipped when it is there, so an interrupted run goes on.
"""

from __future__ import annotations

import json
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engines.models.catalogue import SMOLLM2, entry_of
from engines.models.errors import UnusableFolderError
from engines.models.healing import corpus, dataset, sampling
from engines.models.healing.dataset import Rows
from engines.models.healing.export import export
from engines.models.healing.student import make_student
from engines.models.healing.teacher import fingerprint
from engines.models.healing.training import Training
from engines.models.loading import load
from engines.models.prepare import locked, prepare
from engines.models.progress import Progress, silent
from engines.models.questions import QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engines.models.healing.loss import Losses
    from engines.models.healing.plan import Plan, Recipe, TextSize
    from engines.models.loading import LoadedModel

_CHECKPOINT_S = 180.0
_LOG_STEPS = 10
# A long exercise hides its facts among at most forty sentences.
_FEWEST_SENTENCES = 50


def gather(loaded: LoadedModel, size: TextSize, folder: Path, progress: Progress = silent) -> dict[str, Rows]:
    """The training text by kind, from `folder` if it is there; else made and kept there.

    Conversations take most of the time (ten minutes on two cores): each batch of them is kept as it is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Another size or model has other files.
    key = fingerprint(loaded, json.dumps(asdict(size)).encode())
    place = folder / f"text-{key}.npz"
    with locked(folder, "text", progress):
        if not place.exists():
            kinds = _make(loaded, size, folder / f"conversations-{key}", progress)
            arrays = {
                f"{kind}.{part}": getattr(rows, part) for kind, rows in kinds.items() for part in ("ids", "weights")
            }
            scratch = folder / "text.new.npz"
            np.savez(scratch, **arrays)
            scratch.replace(place)
    with np.load(place) as stored:
        names = sorted({name.partition(".")[0] for name in stored.files})
        return {kind: Rows(stored[f"{kind}.ids"], stored[f"{kind}.weights"]) for kind in names}


def _make(loaded: LoadedModel, size: TextSize, folder: Path, progress: Progress) -> dict[str, Rows]:
    tokenizer = loaded.tokenizer
    documents = corpus.documents(size.seed)
    filler = dataset.sentences(documents)
    progress("packing documents", 0, None)
    if len(filler) < _FEWEST_SENTENCES:
        raise UnusableFolderError(Path(sysconfig.get_path("stdlib")), "too few documentation strings to train on")
    packed = dataset.pack(tokenizer, documents, sampling.ROW_TOKENS, size.document_tokens)
    made = {}
    lengths = {"exercises": (size.exercises, sampling.ROW_TOKENS), "long": (size.long_exercises, dataset.LONG_TOKENS)}
    for kind, (count, length) in lengths.items():
        exercises = dataset.make_exercises(filler, count, length, size.seed + length)
        made[kind] = dataset.exercises(tokenizer, exercises, length)
    talk = np.concatenate(list(_talk(loaded, size, folder, progress)))
    talk = _without_questions(tokenizer, talk)
    kinds = {"conversations": dataset.every_token(talk), "documents": packed, **made}
    return {kind: rows for kind, rows in kinds.items() if len(rows.ids)}


def _without_questions(tokenizer: Any, talk: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # The model may ask itself what it will be judged by.
    asked = [question.lower() for question, _ in QUESTIONS]
    texts = [tokenizer.decode(row).lower() for row in talk]
    return talk[[not any(question in text for question in asked) for text in texts]]


def _talk(loaded: LoadedModel, size: TextSize, folder: Path, progress: Progress) -> Iterator[np.ndarray[Any, Any]]:
    folder.mkdir(exist_ok=True)
    for begin in range(0, size.conversations, sampling.BATCH_ROWS):
        place = folder / f"{begin}.npy"
        rows = min(sampling.BATCH_ROWS, size.conversations - begin)
        if not place.exists():
            sampled = sampling.converse(loaded, rows, seed=size.seed + begin, progress=progress)
            scratch = place.with_suffix(".new.npy")
            np.save(scratch, sampled)
            scratch.replace(place)
        yield np.load(place)


def run(training: Training, plan: Plan, folder: Path, progress: Progress = silent) -> None:
    """Train to the end of `plan`; a checkpoint every three minutes, a line of losses every ten steps."""
    recent: list[Losses] = []
    saved = time.monotonic()
    place = folder / "losses.jsonl"
    lines = place.read_text(encoding="utf-8").splitlines(keepends=True) if place.exists() else []
    # Steps after the last checkpoint are made again.
    place.write_text("".join(line for line in lines if json.loads(line)["step"] <= training.steps_done))
    with place.open("a", encoding="utf-8") as log:
        while not training.done:
            recent.append(training.step())
            step = training.steps_done
            progress("healing", step, plan.steps)
            if step % _LOG_STEPS == 0 or training.done:
                means = {
                    name: round(sum(float(getattr(one, name)) for one in recent) / len(recent), 5)
                    for name in ("divergence", "distance")
                }
                log.write(json.dumps({"step": step, **means}) + "\n")
                log.flush()
                recent = []
            if time.monotonic() - saved >= _CHECKPOINT_S or training.done:
                training.save()
                saved = time.monotonic()


def heal(name: str, recipe: Recipe, root: Path, folder: Path, progress: Progress = silent) -> Path:
    """Train model `name` by `recipe` (hours) and write its adapter file into `folder`; goes on where it stopped.

    Args:
        name: what the model and the adapter file are called.
        recipe: the base, its text, and the plan.
        root: prepared models.
        folder: keeps the text, the teacher's states (1.3 GB) and a subfolder for every model.
        progress: called after every step.

    Raises:
        ModelError: as `prepare`.
        StaleRunError: `folder` holds another run of `name`.
        DivergedRunError: training ran away.
        UnusableFolderError: Python's library has no documentation strings.
    """
    teacher = whole_model(root, progress, recipe.base)
    kinds = gather(teacher, recipe.text, folder, progress)
    student = make_student(whole_model(root, progress, recipe.base), recipe.plan.rank, recipe.plan.seed)
    with locked(folder, name, progress):
        training = Training(student, teacher, kinds, recipe.plan, folder / name)
        run(training, recipe.plan, folder / name, progress)
    place = folder / f"{name}.safetensors"
    provenance = asdict(recipe) | {"torch": torch.__version__}
    export(
        student,
        recipe.base,
        entry_of(recipe.base).sha256["model.safetensors"],
        provenance,
        place,
        rank=recipe.shipped_rank,
    )
    return place


def whole_model(root: Path, progress: Progress = silent, base: str = SMOLLM2) -> LoadedModel:
    """The frozen model `base`, prepared under `root` if need be, in the dtype that this machine is fast with."""
    loaded = load(prepare(base, root, progress=progress))
    loaded.model.to(fast_dtype()).requires_grad_(False)
    return loaded


def fast_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it, at twice the speed of float32; else float32."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    except OSError:
        flags = set()
    return torch.bfloat16 if flags & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32
