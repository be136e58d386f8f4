"""What a way to guide a receiver does to its answers, and how much attention it leaves out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.rows import BLOCK
from engines.reuse.map_records import union
from engines.reuse.settings import PairSettings, ReuseMode
from engines.reuse.study.maps import leave_maps, sparse_enough
from engines.reuse.study.masks import density
from engines.reuse.study.network import dense
from engines.reuse.study.pair import Pair, Planned
from engines.reuse.study.runs import distance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from engines.reuse.settings import ModelIdentity
    from engines.reuse.study.network import Network

    Weights = Mapping[int, torch.Tensor]


MAP_TOP_P = 0.9
"""Share of attention mass that maps keep: the more hardly changes answers, and takes memory and time."""


class Rule(StrEnum):
    """How heads are mixed.

    All alike; the heaviest of the fitted weights alone; as fitted to block masses, or to whole maps; as trained.
    """

    UNIFORM = "uniform"
    ONE_HOT = "one-hot"
    FITTED = "fitted"
    MAPS = "fitted to maps"
    TRAINED = "trained"


@dataclass(frozen=True)
class Candidate:
    """A way to guide the receiver: from which layer on, how heads are mixed, and how much mass is kept.

    Attributes:
        layer_top_p: layers that do not keep `top_p`, with what they keep.
        map_density: layers of whose map no more than this share of the blocks is kept by some head are computed by it.
    """

    first_layer: int
    rule: Rule
    top_p: float
    layer_top_p: tuple[tuple[int, float], ...] = ()
    map_density: float = 0.0

    @property
    def mode(self) -> ReuseMode:
        """What of the sender's is reused."""
        if not self.map_density:
            return ReuseMode.GUIDED
        return ReuseMode.MAP if self.map_density >= 1 else ReuseMode.HYBRID


@dataclass
class Tried:
    """Of one candidate, a figure a text.

    Attributes:
        divergence: mean KL from the dense run over the tokens of a continuation, in nats.
        agreement: share of these tokens where both would say the same next.
        density: kept blocks as a share of the causal ones, mean of the guided layers; of a map half of those that some
            head keeps, as it takes half the work.
    """

    divergence: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    density: list[float] = field(default_factory=list)

    def saved(self, candidate: Candidate, layers: int) -> float:
        """Share of all attention that is left out: what a candidate is chosen for."""
        return (1 - statistics.fmean(self.density)) * (layers - 1 - candidate.first_layer) / layers


@dataclass(frozen=True)
class Models:
    """Both models and what was found of them.

    Attributes:
        sender, receiver: networks.
        sender_identity: of the sender.
        layers: sender layer of each receiver layer.
        weights: by rule, [H_S, H_R] of every layer that can be guided; `FITTED` at the least.
    """

    sender: Network
    receiver: Network
    sender_identity: ModelIdentity
    layers: tuple[int, ...]
    weights: Mapping[Rule, Weights]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """By which it can be mixed."""
        return tuple(rule for rule in Rule if rule in self.weights or rule in (Rule.UNIFORM, Rule.ONE_HOT))

    def mixed(self, rule: Rule, layers: Iterable[int]) -> dict[int, torch.Tensor]:
        """Weights [H_S, H_R] of these layers."""
        return {layer: self._of(rule, layer) for layer in layers}

    def _of(self, rule: Rule, layer: int) -> torch.Tensor:
        if rule in self.weights:
            return self.weights[rule][layer]
        fitted = self.weights[Rule.FITTED][layer]
        if rule is Rule.UNIFORM:
            return torch.full_like(fitted, 1 / len(fitted))
        found = torch.zeros_like(fitted)
        found[fitted.argmax(dim=0), torch.arange(fitted.shape[1])] = 1.0
        return found

    def pair(self, candidate: Candidate) -> Pair:
        """The pair as a candidate wants it."""
        settings = PairSettings(
            sender=self.sender_identity,
            layers=self.layers,
            first_layer=candidate.first_layer,
            top_p=candidate.top_p,
            layer_top_p=dict(candidate.layer_top_p),
            min_tokens=BLOCK,
            max_density=1.0,
            mode=candidate.mode,
            map_top_p=MAP_TOP_P,
            map_density=candidate.map_density or 1.0,
        )
        return Pair(self.sender, self.receiver, settings, self.mixed(candidate.rule, settings.guided))


class Trials:
    """Compares candidates on the same texts, each of which the sender and the dense receiver read once.

    Args:
        models: both.
        candidates: all that will be tried.
        tail: tokens at the end of each text that are predicted; what is before them, a multiple of 64, is guided.
    """

    def __init__(self, models: Models, candidates: Sequence[Candidate], tail: int) -> None:
        self._pairs = {candidate: models.pair(candidate) for candidate in candidates}
        self._receiver = models.receiver
        self._tail = tail
        self.tried = {candidate: Tried() for candidate in candidates}

    def read(self, text: Sequence[int]) -> None:
        """Try every candidate on one text, and note what came of it; see `measure`."""
        self.note(self.measure(text).tolist())

    def note(self, figures: Sequence[Sequence[float]]) -> None:
        """Take over what was measured of one text, [candidates, 3]."""
        for tried, (divergence, agreement, kept) in zip(self.tried.values(), figures, strict=True):
            tried.divergence.append(divergence)
            tried.agreement.append(agreement)
            tried.density.append(kept)

    def measure(self, text: Sequence[int]) -> torch.Tensor:
        """Divergence, agreement and density float64 [candidates, 3] on one text.

        Raises:
            ValueError: its prefix is no whole number of row blocks.
        """
        prefix = len(text) - self._tail
        if prefix < BLOCK or prefix % BLOCK:
            raise ValueError(f"want whole row blocks of {BLOCK} tokens before the last {self._tail}, got {prefix}")
        # Its layers are all that any of them needs.
        widest = min(self._pairs.values(), key=lambda pair: pair.settings.first_layer)
        left = widest.leave(text)
        exact = self._receiver.log_probabilities(self._receiver.hidden(text, dense)[prefix:])
        by_maps = any(pair.settings.uses_maps for pair in self._pairs.values())
        packed = leave_maps(widest, text[:prefix], top_p=MAP_TOP_P) if by_maps else {}
        figures = []
        pages = prefix // BLOCK
        for pair in self._pairs.values():
            guides = pair.guides(left, pages)
            maps = sparse_enough(pair, packed) if pair.settings.uses_maps else {}
            attend = Planned(guides, frozenset(range(pages)), maps, pair.weights)
            found = self._receiver.log_probabilities(self._receiver.hidden(text, attend)[prefix:])
            work = {layer: density(one.index) for layer, one in guides.items()}
            work |= {layer: union(own) / 2 for layer, own in maps.items()}
            figures.append((*distance(exact, found), statistics.fmean(work.values())))
        return torch.tensor(figures, dtype=torch.float64)
