"""What a calibration is asked for, and everything that it finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engines.calibration.gate import Limits, Verdicts
from engines.calibration.trial import MAP_TOP_P, Candidate, Rule, Tried
from engines.reuse.artifact import DataSource, Manifest, Measured

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from engines.calibration.alignment import Alignment
    from engines.calibration.maps import MapFit
    from engines.calibration.profile import Profile
    from engines.calibration.texts import Passages
    from engines.reuse.settings import ModelIdentity


MAP_DENSITIES = (0.3, 0.5, 0.7, 0.85, 1.0)
"""Up to which layers are tried by maps if maps are wanted; the last is all of them."""


@dataclass(frozen=True)
class Wanted:
    """What to calibrate with.

    Attributes:
        tokens: of the prefix of a text to fit by, whole row blocks.
        gate_tokens: of the prefix of a text to choose or to judge by, and of a conversation about facts.
        tail: tokens after a prefix that are predicted.
        fit, choice, gate: how many texts of each source for that purpose.
        choice_needles, needles: facts to recall, to choose by and to judge by.
        answers: greedy answers to judge by.
        first_layers, rules, top_ps: what is tried, of rules those that there are.
        limits: of the gate.
        map_densities: up to which layers are tried by maps; none tries no maps.
        train_steps: of training the fitted weights end to end, of one text each; 0 for none.
        min_tokens: fewer that could be guided are not worth it.
        seed: of texts, facts and random masks.
    """

    tokens: int = 1024
    gate_tokens: int = 2048
    tail: int = 128
    fit: int = 6
    choice: int = 3
    gate: int = 4
    choice_needles: int = 24
    needles: int = 40
    answers: int = 16
    first_layers: tuple[int, ...] = (1, 2, 3)
    rules: tuple[Rule, ...] = (Rule.UNIFORM, Rule.ONE_HOT, Rule.FITTED, Rule.TRAINED)
    top_ps: tuple[float, ...] = (0.85, 0.9, 0.95, 0.97)
    map_densities: tuple[float, ...] = ()
    train_steps: int = 0
    limits: Limits = field(default_factory=Limits)
    min_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Calibrated:
    """Everything that was found.

    Attributes:
        sender, receiver: models.
        profile: of all layers.
        alignment, other: the one that was taken, and what suffixes or order would have given.
        maps: mixtures fitted to whole maps.
        losses: of every step of training.
        tried: every candidate on the texts to choose by.
        chosen: the one that leaves out most within the limits; if none is, the one that is nearest to the dense run.
        weights: [H_S, H_R] of each guided receiver layer, as the chosen rule mixes.
        verdicts, gate: of the chosen one on the texts to judge by.
        data: what was read.
        seconds: of work in each step, that of earlier runs which were ended included.
        wanted: what was asked for.
    """

    sender: ModelIdentity
    receiver: ModelIdentity
    profile: Profile
    alignment: Alignment
    other: Alignment
    maps: Mapping[int, MapFit]
    losses: tuple[float, ...]
    tried: Mapping[Candidate, Tried]
    chosen: Candidate
    weights: Mapping[int, torch.Tensor]
    verdicts: Verdicts
    gate: tuple[Measured, ...]
    data: tuple[Passages, ...]
    seconds: Mapping[str, float]
    wanted: Wanted

    def manifest(self, made_by: Mapping[str, str]) -> Manifest:
        """For the artifact."""
        return Manifest(
            sender=self.sender,
            receiver=self.receiver,
            layers=self.alignment.layers,
            first_layer=self.chosen.first_layer,
            mode=self.chosen.mode,
            **({"map_top_p": MAP_TOP_P, "map_density": self.chosen.map_density} if self.chosen.map_density else {}),
            top_p=self.chosen.top_p,
            layer_top_p=dict(self.chosen.layer_top_p),
            layer_density=dict(zip(self.weights, self.verdicts.layer_density, strict=True)),
            min_tokens=self.wanted.min_tokens,
            max_density=self.wanted.limits.density,
            gate=self.gate,
            data=tuple(
                DataSource(purpose=one.purpose.value, name=one.name, digest=one.digest, tokens=sum(map(len, one.texts)))
                for one in self.data
            ),
            seconds=dict(self.seconds),
            made_by=dict(made_by),
        )
