"""What a way to guide a receiver does to its answers, and how much attention it leaves out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.rows import BLOCK
from engines.reuse.settings import PairSettings
from engines.reuse.study.masks import density
from engines.reuse.study.network import dense
from engines.reuse.study.pair import Pair, Sparse
from engines.reuse.study.runs import distance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engines.reuse.settings import ModelIdentity
    from engines.reuse.study.network import Network


class Rule(StrEnum):
    """How heads are mixed: all alike, the heaviest of the fitted weights alone, or as fitted."""

    UNIFORM = "uniform"
    ONE_HOT = "one-hot"
    FITTED = "fitted"


@dataclass(frozen=True)
class Candidate:
    """A way to guide the receiver: from which layer on, how heads are mixed, and how much mass is kept."""

    first_layer: int
    rule: Rule
    top_p: float


@dataclass
class Tried:
    """Of one candidate, a figure a text.

    Attributes:
        divergence: mean KL from the dense run over the tokens of a continuation, in nats.
        agreement: share of these tokens where both would say the same next.
        density: kept blocks as a share of the causal ones, mean of the guided layers.
    """

    divergence: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    density: list[float] = field(default_factory=list)

    def saved(self, candidate: Candidate, layers: int) -> float:
        """Share of all attention that is left out: what a candidate is chosen for."""
        return (1 - statistics.fmean(self.density)) * (layers - 1 - candidate.first_layer) / layers


@dataclass(frozen=True)
class Models:
    """Both models, the sender layer of each receiver layer, and fitted weights [H_S, H_R] of all that can be guided."""

    sender: Network
    receiver: Network
    sender_identity: ModelIdentity
    layers: tuple[int, ...]
    weights: Mapping[int, torch.Tensor]

    def pair(self, candidate: Candidate) -> Pair:
        """The pair as a candidate wants it."""
        settings = PairSettings(
            sender=self.sender_identity,
            layers=self.layers,
            first_layer=candidate.first_layer,
            top_p=candidate.top_p,
            min_tokens=BLOCK,
            max_density=1.0,
        )
        mixed = {layer: _by_rule(candidate.rule, self.weights[layer]) for layer in settings.guided}
        return Pair(self.sender, self.receiver, settings, mixed)


def _by_rule(rule: Rule, fitted: torch.Tensor) -> torch.Tensor:
    if rule is Rule.FITTED:
        return fitted
    if rule is Rule.UNIFORM:
        return torch.full_like(fitted, 1 / len(fitted))
    heads = fitted.shape[1]
    found = torch.zeros_like(fitted)
    found[fitted.argmax(dim=0), torch.arange(heads)] = 1.0
    return found


class Trials:
    """Compares candidates on the same texts, each of which the sender and the dense receiver read once.

    Args:
        models: both.
        candidates: all that will be tried, one at the least.
        tail: tokens at the end of each text that are predicted; what is before them, a multiple of 64, is guided.
    """

    def __init__(self, models: Models, candidates: Sequence[Candidate], tail: int) -> None:
        self._pairs = {candidate: models.pair(candidate) for candidate in candidates}
        self._receiver = models.receiver
        # Its layers are all that any of them needs.
        self._widest = min(self._pairs.values(), key=lambda pair: pair.settings.first_layer)
        self._tail = tail
        self.tried = {candidate: Tried() for candidate in candidates}

    def read(self, text: Sequence[int]) -> None:
        """Try every candidate on one text.

        Raises:
            ValueError: its prefix is no whole number of row blocks.
        """
        prefix = len(text) - self._tail
        if prefix < BLOCK or prefix % BLOCK:
            raise ValueError(f"want whole row blocks of {BLOCK} tokens before the last {self._tail}, got {prefix}")
        left = self._widest.leave(text)
        exact = self._receiver.log_probabilities(self._receiver.hidden(text, dense)[prefix:])
        for candidate, pair in self._pairs.items():
            guides = {layer: one.index for layer, one in pair.guides(left, prefix // BLOCK).items()}
            found = self._receiver.log_probabilities(self._receiver.hidden(text, Sparse(guides))[prefix:])
            tried = self.tried[candidate]
            divergence, agreement = distance(exact, found)
            tried.divergence.append(divergence)
            tried.agreement.append(agreement)
            tried.density.append(statistics.fmean(density(index) for index in guides.values()))
