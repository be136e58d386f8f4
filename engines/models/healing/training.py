"""The training loop: fade layers out, follow the whole model, and go on after an interruption."""

from __future__ import annotations

import pickle
import random
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from engines.models.errors import DivergedRunError, StaleRunError
from engines.models.healing import loss
from engines.models.healing.plan import learning_rate, shares
from engines.models.healing.teacher import TeacherStates, final_states, fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from engines.models.healing.dataset import Rows
    from engines.models.healing.plan import Plan
    from engines.models.healing.student import Student
    from engines.models.loading import LoadedModel


def batches(kinds: Mapping[str, Rows], plan: Plan) -> list[tuple[str, list[int]]]:
    """The batch of every step: a kind and the rows of it. All rows once in a random order, then again in another.

    Those that are left when a kind's rows are dealt out in full batches wait for the next time.

    Raises:
        ValueError: no kind has rows enough for a batch.
    """
    rng = random.Random(plan.seed)
    made: list[tuple[str, list[int]]] = []
    while len(made) < plan.steps:
        epoch = []
        for kind, rows in kinds.items():
            order = list(range(len(rows.ids)))
            rng.shuffle(order)
            size = max(1, plan.batch_tokens // rows.ids.shape[1])
            epoch += [(kind, order[begin : begin + size]) for begin in range(0, len(order) - size + 1, size)]
        if not epoch:
            raise ValueError(f"no kind of text fills a batch of {plan.batch_tokens} tokens")
        rng.shuffle(epoch)
        made += epoch
    return made[: plan.steps]


class Training:
    """One run in `folder`: `step()` until `done`; a new object goes on from the last checkpoint there.

    Raises:
        StaleRunError: that checkpoint cannot be read, or comes from another plan, text or base.
    """

    def __init__(
        self, student: Student, teacher: LoadedModel, kinds: Mapping[str, Rows], plan: Plan, folder: Path
    ) -> None:
        self._student, self._teacher, self._kinds, self._plan, self._folder = student, teacher, kinds, plan, folder
        self._batches = batches(kinds, plan)
        self._targets = {
            kind: TeacherStates(teacher, kind, rows, folder.parent / "teacher") for kind, rows in kinds.items()
        }
        self._source = fingerprint(teacher, *(rows.ids.tobytes() for _, rows in sorted(kinds.items())))
        self._optimiser = torch.optim.AdamW(student.trained().values(), lr=0.0, weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(plan.seed)
        self.steps_done = 0
        folder.mkdir(parents=True, exist_ok=True)
        if self._checkpoint.exists():
            self._load()

    @property
    def done(self) -> bool:
        """Whether every step of the plan was made."""
        return self.steps_done >= self._plan.steps

    def step(self) -> loss.Losses:
        """One batch, one update.

        Raises:
            DivergedRunError: the loss is no number.
        """
        plan, number = self._plan, self.steps_done
        self._student.fade(shares(plan, number))
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate(plan, number)
        kind, rows = self._batches[number]
        found = self._losses(kind, rows, plan.positions)
        if not torch.isfinite(found.total):
            raise DivergedRunError(self._folder, number)
        self._optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(found.total)
        torch.nn.utils.clip_grad_norm_(self._student.trained().values(), 1.0)
        self._optimiser.step()
        self.steps_done += 1
        return found

    def _losses(self, kind: str, rows: Sequence[int], positions: int) -> loss.Losses:
        data = self._kinds[kind]
        ids = torch.from_numpy(data.ids[rows].astype("int64"))
        weights = torch.from_numpy(data.weights[rows]).reshape(-1)
        target = self._targets[kind][rows]
        states = final_states(self._student.loaded, ids)
        real = weights > 0
        chosen = loss.choose_positions(weights[real], positions, self._generator)
        head = self._teacher.model.lm_head.weight
        return loss.losses(states[real], target[real], head, chosen, self._plan.distance_weight)

    def save(self) -> None:
        """Write a checkpoint; the one before stays until this one is whole."""
        state = {
            "parameters": self._student.trained(),
            "optimiser": self._optimiser.state_dict(),
            "generator": self._generator.get_state(),
            "steps_done": self.steps_done,
            "plan": asdict(self._plan),
            "source": self._source,
        }
        scratch = self._checkpoint.with_suffix(".new")
        torch.save(state, scratch)
        scratch.replace(self._checkpoint)

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "checkpoint.pt"

    def _load(self) -> None:
        try:
            state = torch.load(self._checkpoint, weights_only=True)
            known = (state["plan"], state["source"])
        except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise StaleRunError(self._checkpoint) from error
        if known != (asdict(self._plan), self._source):
            raise StaleRunError(self._checkpoint)
        with torch.no_grad():
            for name, value in self._student.trained().items():
                value.copy_(state["parameters"][name])
        self._optimiser.load_state_dict(state["optimiser"])
        self._generator.set_state(state["generator"])
        self.steps_done = state["steps_done"]
        if self.steps_done:
            # A run that is done makes no step that would do it.
            self._student.fade(shares(self._plan, self.steps_done - 1))
