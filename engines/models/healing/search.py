"""Which layers to drop: the set that changes the whole model's next tokens least, found greedily.

Judged on three samples together, since they name different layers: the model's own conversations, prose, and answers
that stand earlier in the text. Layers 16 and 18 of SmolLM2 change prose no more than others but carry recall.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from engines.models import texts
from engines.models.healing.dataset import ANSWER_WEIGHT, Rows, every_token
from engines.models.healing.loss import log_probabilities
from engines.models.healing.teacher import final_states
from engines.models.perplexity import encode, without_layers
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engines.models.loading import LoadedModel

# Text follows its neighbours: every fourth position says as much as all, for a quarter of the logits.
_EVERY = 4
# An answer's divergence is larger and noisier than that of text.
_RECALL_SHARE = 0.5


@dataclass(frozen=True)
class Cost:
    """KL(whole ‖ rest) in nats a position, for each sample."""

    conversations: float
    prose: float
    recall: float

    @property
    def total(self) -> float:
        """What the search minimises."""
        return self.conversations + self.prose + _RECALL_SHARE * self.recall


@dataclass(frozen=True)
class Dropped:
    """Layers in the order in which they were dropped, and the cost of having dropped all of them."""

    layers: tuple[int, ...]
    cost: Cost


class Samples:
    """The texts to judge on, and what the whole model says of them; rows of one length."""

    def __init__(self, loaded: LoadedModel, conversations: Rows, prose: Rows, recall: Rows) -> None:
        self._loaded = loaded
        kinds = (conversations, prose, recall)
        self._ids = torch.from_numpy(np.concatenate([kind.ids for kind in kinds]).astype("int64"))
        every = np.zeros(self._ids.shape[1], bool)
        every[_EVERY - 1 :: _EVERY] = True
        masks = [(kind.weights > 0) & every for kind in kinds[:2]] + [recall.weights == ANSWER_WEIGHT]
        self._chosen = torch.from_numpy(np.concatenate(masks).reshape(-1))
        self._kinds = np.repeat(np.arange(len(kinds)), [int(mask.sum()) for mask in masks])
        self._whole = self._predictions()

    def cost(self, dropped: Sequence[int]) -> Cost:
        """The cost of dropping layers, numbered from 0."""
        with without_layers(self._loaded, dropped):
            rest = self._predictions()
        found = functional.kl_div(rest, self._whole, reduction="none", log_target=True).sum(-1).numpy()
        return Cost(*(float(found[self._kinds == kind].mean()) for kind in range(3)))

    def _predictions(self) -> torch.Tensor:
        with torch.inference_mode():
            head = self._loaded.model.lm_head.weight
            return log_probabilities(final_states(self._loaded, self._ids)[self._chosen], head)


def samples_of(loaded: LoadedModel, text: Mapping[str, Rows], rows: int = 2) -> Samples:
    """`rows` of each sample: the last conversations and exercises of a run's `text`, and calibration prose."""
    length = text["conversations"].ids.shape[1]
    ids = encode(loaded, texts.prose(texts.Part.CALIBRATION), rows * length)
    prose = every_token(np.array(ids, np.uint16).reshape(rows, length))
    talk, exercises = (
        Rows(text[kind].ids[-rows:], text[kind].weights[-rows:]) for kind in ("conversations", "exercises")
    )
    return Samples(loaded, talk, prose, exercises)


def single_costs(samples: Samples, layers: Sequence[int], progress: Progress = silent) -> dict[int, Cost]:
    """The cost of dropping each one of `layers`."""
    found = {}
    for done, layer in enumerate(layers, 1):
        found[layer] = samples.cost([layer])
        progress("dropping single layers", done, len(layers))
    return found


def drop_greedily(
    samples: Samples, single: Mapping[int, Cost], count: int, *, candidates: int = 9, progress: Progress = silent
) -> list[Dropped]:
    """The best sets of 1, 2, … `count` layers, each with one layer more than the one before.

    Each time the `candidates` most promising layers are tried: those whose cost was lowest when last measured.
    """
    last = {layer: cost.total for layer, cost in single.items()}
    found: list[Dropped] = []
    chosen: tuple[int, ...] = ()
    for number in range(count):
        tried = sorted((layer for layer in last if layer not in chosen), key=last.__getitem__)[:candidates]
        costs = {}
        for done, layer in enumerate(tried, 1):
            costs[layer] = samples.cost([*chosen, layer])
            last[layer] = costs[layer].total
            progress(f"choosing layers, {number + 1} of {count}", done, len(tried))
        best = min(costs, key=lambda layer: costs[layer].total)
        # Those not tried were measured before the last layer went, and must not look better for it.
        totals = [0.0, *(one.cost.total for one in found)]
        stale = totals[-1] - totals[-2] if found else 0.0
        last = {layer: value if layer in costs else value + stale for layer, value in last.items()}
        chosen = (*chosen, best)
        found.append(Dropped(chosen, costs[best]))
    return found
