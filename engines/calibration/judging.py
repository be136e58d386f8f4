"""A pair on texts that nothing was chosen by: guided, and in ways that were not chosen but are as dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from crossfill_kernels.rows import BLOCK
from engines.calibration.answers import ask, f1, rouge_l
from engines.calibration.rivals import as_dense
from engines.calibration.switches import SWITCHES, Talk
from engines.errors import CalibrationFitError
from engines.reuse.study.masks import Mask
from engines.reuse.study.network import dense
from engines.reuse.study.pair import Planned, Sparse
from engines.reuse.study.passages import recollection
from engines.reuse.study.runs import Runs, distance, recalled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from engines.calibration.rivals import Rival
    from engines.models.needle import Needle
    from engines.reuse.study.network import Attend
    from engines.reuse.study.pair import Pair

    Figures = dict[str, npt.NDArray[np.generic]]

CONTROLS = (Mask.RANDOM, Mask.WINDOW)


def after(switches: int) -> str:
    """The name of the receiver's answers after so many switches of models."""
    return f"after {switches} switches"


@dataclass(frozen=True)
class Judge:
    """Measures a pair, text by text.

    Attributes:
        pair: as it is to be used.
        rivals: other ways to mix heads.
        tail: tokens at the end of a text that are predicted.
        seed: of random masks and conversations.
        controls: masks made without the sender.
    """

    pair: Pair
    rivals: Sequence[Rival]
    tail: int
    seed: int
    controls: Sequence[Mask] = CONTROLS

    def read(self, text: Sequence[int], number: int) -> Figures:
        """Divergence and agreement [2] of each way by its name and after switches of models; `density` by guided layer.

        Args:
            text: whole row blocks, and its tail.
            number: of the text.

        Raises:
            CalibrationFitError: a divergence is not finite.
        """
        prefix, receiver = len(text) - self.tail, self.pair.receiver
        runs = self._runs(text, prefix, number)
        dense_hidden = receiver.hidden(text, dense)

        def apart(hidden: torch.Tensor, rows: slice) -> npt.NDArray[np.generic]:
            exact, own = (receiver.log_probabilities(one[rows]) for one in (dense_hidden, hidden))
            far = np.asarray(distance(exact, own))
            if not np.isfinite(far).all():
                raise CalibrationFitError(f"text {number + 1}: {receiver.layers} layers say no numbers")
            return far

        found: Figures = {"density": np.array([*runs.densities.values()])}
        for name, attend in self._ways(runs, prefix):
            found[name] = apart(receiver.hidden(text, attend), slice(prefix, len(text)))
        talk = Talk(prefix)
        hidden = receiver.hidden(text, Planned(runs.guides, talk.pages, runs.maps, self.pair.weights))
        for switches in SWITCHES:
            answer = talk.answer(switches)
            # Each token is predicted by the one before it.
            found[after(switches)] = apart(hidden, slice(answer.start - 1, answer.stop - 1))
        return found

    def remember(self, asked: Sequence[Needle], prose: Sequence[int], number: int) -> Figures:
        """Whether each fact of a conversation is recalled, by each way and the dense one; and `density`.

        Args:
            asked: the facts.
            prose: of the conversation, as many tokens, whole row blocks.
            number: of the conversation.
        """
        tokens = len(prose)
        talk = recollection(self.pair.receiver.tokenizer, asked, tokens, self.seed + number, prose)
        runs = self._runs(talk.tokens, tokens, number)
        ways = [(Mask.DENSE.value, dense), *self._ways(runs, tokens)]
        hidden = ((name, self.pair.receiver.hidden(talk.tokens, attend)) for name, attend in ways)
        found = {name: np.asarray(recalled(self.pair.receiver, one, talk)) for name, one in hidden}
        return {"density": np.array([*runs.densities.values()]), **found}

    def ask(self, asked: Sequence[Needle], prose: Sequence[int]) -> Figures:
        """ROUGE-L and F1 [questions, 2] of greedy answers to facts in prose, dense and guided."""
        said = ask(self.pair, asked, prose)
        return {
            mask.value: np.array(
                [(rouge_l(one, of.fact), f1(one, of.fact)) for one, of in zip(answers, asked, strict=True)]
            )
            for mask, answers in said.items()
        }

    def _runs(self, text: Sequence[int], prefix: int, number: int) -> Runs:
        return Runs(self.pair, text, prefix, torch.Generator().manual_seed(self.seed + number))

    def _ways(self, runs: Runs, prefix: int) -> Iterator[tuple[str, Attend]]:
        """Guided, and what is as dense as that: controls list by list, rivals layer by layer."""
        for mask, attend in runs.under((Mask.GUIDED, *self.controls)):
            yield mask.value, attend
        for rival in self.rivals:
            yield rival.name, Sparse(as_dense(self.pair, rival, runs.left, prefix // BLOCK, runs.densities))
