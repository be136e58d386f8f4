"""Train the mixture of heads end to end: by what the receiver says after a context that was prefilled through reuse.

MapFlow, § Calibration (b): both models stay as they are, texts are context | appended tokens | answer, and only the
tokens of the answer count. Through maps every weight has an exact gradient; through guided prefill, whose choice of
blocks has none, gates stand in for it (`engines.calibration.gradients`).
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.rows import BLOCK
from engines.calibration.contexts import read_guided, read_mapped, reusing
from engines.calibration.mixture import Mixture
from engines.calibration.trial import Candidate, Rule
from engines.models.progress import Progress, silent
from engines.reuse.study.network import dense
from engines.reuse.study.runs import distance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engines.calibration.contexts import Context
    from engines.calibration.trial import Models
    from engines.reuse.study.pair import Pair

    State = Mapping[str, torch.Tensor]


class Through(StrEnum):
    """How the context is prefilled: over the blocks that mixed masses name, or by mixed maps."""

    GUIDED = "guided"
    MAP = "map"


class Loss(StrEnum):
    """What an answer is compared with: its own tokens, as in the paper, or all that the receiver says densely.

    The second tells of every token of the vocabulary at every place, so it needs fewer texts.
    """

    CROSS_ENTROPY = "cross-entropy"
    DIVERGENCE = "divergence"


@dataclass(frozen=True)
class Training:
    """How weights are trained.

    Attributes:
        through, loss: see there.
        first_layer: receiver layers before it, and the last one, are computed as always.
        top_p: share of mass that kept blocks reach; of maps, 1 takes all of them.
        tail: tokens after the context, the appended ones and the answer; before them are whole row blocks.
        answer: the last tokens of these, which count.
        steps: of one text each; texts come in a random order, then in another.
        learning_rate: of the logarithm of a weight; over the second half of the steps it falls to nothing.
        spread: share of a uniform mixture in the weights to start with.
        temperature: of gates, see `gates`.
        seed: of the order of texts.
    """

    through: Through = Through.GUIDED
    loss: Loss = Loss.DIVERGENCE
    first_layer: int = 3
    top_p: float = 0.95
    tail: int = 128
    answer: int = 128
    steps: int = 100
    learning_rate: float = 0.05
    spread: float = 0.05
    temperature: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.answer <= self.tail or self.steps < 0:
            raise ValueError(f"want an answer within the tail and no negative steps, got {self}")
        if not (0 <= self.spread < 1 and self.learning_rate > 0 and self.temperature > 0):
            raise ValueError(f"want a spread in [0, 1), a positive learning rate and temperature, got {self}")


@dataclass(frozen=True)
class Held:
    """Means over texts that nothing was trained on.

    Attributes:
        divergence: KL from the dense run over the answer's tokens, in nats.
        agreement: share of them where both would say the same next.
        density: blocks that are read as a share of the causal ones.
    """

    divergence: float
    agreement: float
    density: float


@dataclass(frozen=True)
class Trained:
    """What came out.

    Attributes:
        weights: float32 [H_S, H_R] of each guided receiver layer; columns are mixtures, with zeros.
        losses: of every step, those before an interruption included.
        before, after: of the held-out texts, with the weights as given and as returned; None without texts.
    """

    weights: Mapping[int, torch.Tensor]
    losses: tuple[float, ...]
    before: Held | None
    after: Held | None


def train(
    models: Models,
    start: Mapping[int, torch.Tensor],
    texts: Sequence[Sequence[int]],
    plan: Training,
    *,
    held_out: Sequence[Sequence[int]] = (),
    progress: Progress = silent,
    state: State | None = None,
    on_step: Callable[[State], None] | None = None,
) -> Trained:
    """Train the weights of all guided layers together; the models are not changed.

    Args:
        models: both; `weights` of them are not used.
        start: [H_S, H_R] of each guided receiver layer, columns on the simplex.
        texts: token ids.
        plan: how.
        held_out: texts to measure by, before and after.
        progress: told of every step.
        state: of a run with the same arguments, to go on from.
        on_step: given the state after every step.

    Raises:
        CalibrationFitError: the loss of a step is no number; `start` has no mixtures; `state` is of other weights.
        ValueError: a text's context is no whole number of row blocks, weights of a layer are missing, there is no text.
    """
    _check(models, start, (*texts, *held_out), plan)
    candidate = Candidate(plan.first_layer, Rule.FITTED, plan.top_p)
    reading = _Reading(replace(models, weights={Rule.FITTED: start}).pair(candidate), plan)
    mixture = Mixture({layer: start[layer] for layer in reading.pair.settings.guided}, plan.spread)
    if state is not None:
        mixture.load(state)
    before = reading.judge(held_out, reading.pair.weights)
    progress("training weights", mixture.steps, plan.steps)
    while mixture.steps < plan.steps:
        text = texts[_turn(mixture.steps, len(texts), plan.seed)]
        rate = plan.learning_rate * min(1.0, 2 * (1 - mixture.steps / plan.steps))
        mixture.step(reading.loss(text, mixture.weights()), rate)
        if on_step is not None:
            on_step(mixture.state())
        progress("training weights", mixture.steps, plan.steps)
    weights = mixture.sparse()
    return Trained(weights, tuple(mixture.losses), before, reading.judge(held_out, weights))


def _check(models: Models, start: Mapping[int, torch.Tensor], texts: Sequence[Sequence[int]], plan: Training) -> None:
    missing = set(range(plan.first_layer, models.receiver.layers - 1)) - start.keys()
    if missing:
        raise ValueError(f"there are no weights to start with of layers {sorted(missing)}")
    if not texts:
        raise ValueError("there is no text to train on")
    for text in texts:
        tokens = len(text) - plan.tail
        if tokens < BLOCK or tokens % BLOCK:
            raise ValueError(f"want whole row blocks of {BLOCK} tokens before the last {plan.tail}, got {tokens}")


def _turn(step: int, count: int, seed: int) -> int:
    """Which text a step is of; a function of its number alone, so that a run can be gone on with."""
    order = list(range(count))
    random.Random(f"{seed} {step // count}").shuffle(order)
    return order[step % count]


class _Reading:
    """Texts as both models read them; what does not depend on the weights is computed once, but for maps."""

    def __init__(self, pair: Pair, plan: Training) -> None:
        self.pair = pair
        self._plan = plan
        self._exact: dict[tuple[int, ...], torch.Tensor] = {}
        self._contexts: dict[tuple[int, ...], Context] = {}

    def loss(self, text: Sequence[int], weights: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Of the answer, a scalar through which gradients reach the weights."""
        found = self._said(text, self._context(text), weights, grad=True)
        if self._plan.loss is Loss.DIVERGENCE:
            exact = self._dense(text)
            return (exact.exp() * (exact - found)).sum(dim=-1).mean()
        answer = torch.tensor(list(text[-self._plan.answer :]))
        return -found.gather(1, answer[:, None]).mean()

    def judge(self, texts: Sequence[Sequence[int]], weights: Mapping[int, torch.Tensor]) -> Held | None:
        """How far answers are from the dense run's."""
        if not texts:
            return None
        apart, kept = [], []
        for text in texts:
            context = self._context(text)
            apart.append(distance(self._dense(text), self._said(text, context, weights, grad=False)))
            kept.append(context.density(weights))
        divergence, agreement = (statistics.fmean(one) for one in zip(*apart, strict=True))
        return Held(divergence, agreement, statistics.fmean(kept))

    def _said(
        self, text: Sequence[int], context: Context, weights: Mapping[int, torch.Tensor], *, grad: bool
    ) -> torch.Tensor:
        """Log-probabilities [answer, V] of the tokens of the answer."""
        attend = reusing(context, weights, len(text) - self._plan.tail)
        hidden = self.pair.receiver.hidden(text, attend, grad=grad)
        return self.pair.receiver.log_probabilities(self._before_answer(hidden), grad=grad)

    def _before_answer(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the rows that say the answer, each the token after it."""
        return hidden[-self._plan.answer - 1 : -1]

    def _dense(self, text: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [answer, V] of the dense run; kept are its hidden states, which are a hundredth of it."""
        key = tuple(text)
        if key not in self._exact:
            hidden = self.pair.receiver.hidden(text, dense)
            # Copied out of inference mode, whose tensors gradients cannot pass.
            self._exact[key] = self._before_answer(hidden).clone()
        return self.pair.receiver.log_probabilities(self._exact[key]).clone()

    def _context(self, text: Sequence[int]) -> Context:
        tokens, key = len(text) - self._plan.tail, tuple(text)
        if self._plan.through is Through.MAP:
            # Queries and keys of one text are 70 MB of 20 layers of nine heads.
            return read_mapped(self.pair, text, tokens)
        if key not in self._contexts:
            self._contexts[key] = read_guided(self.pair, text, tokens, self._plan.temperature)
        return self._contexts[key]
