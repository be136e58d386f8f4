"""How well each sender layer explains each receiver layer: the layer-wise profile of MapFlow, § Calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engines.calibration.simplex import fit_squares, fit_total_variation, total_variations
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from engines.calibration.samples import Samples

    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """Total variation [R, S] of each receiver layer from its best mixture of a sender layer's heads, mean of heads."""

    variation: Floats

    @property
    def best(self) -> tuple[int, ...]:
        """The sender layer that explains each receiver layer best."""
        return tuple(int(layer) for layer in self.variation.argmin(axis=1))


def profile(samples: Samples, *, progress: Progress = silent) -> Profile:
    """Fit every receiver layer with every sender layer, by squared error; R·S fits of H_R heads."""
    receivers, senders = len(samples.receiver), len(samples.sender)
    found = np.zeros((receivers, senders))
    targets = [layer.astype(np.float64) for layer in samples.receiver]
    progress("comparing layers", 0, senders)
    for sender in range(senders):
        sources = samples.sender[sender].astype(np.float64)
        gram = sources @ sources.T
        for receiver, target in enumerate(targets):
            weights = fit_squares(gram, sources @ target.T)
            found[receiver, sender] = total_variations(sources, target, weights).mean()
        progress("comparing layers", sender + 1, senders)
    return Profile(found)


def fit_weights(
    samples: Samples, layers: Sequence[int], guided: Sequence[int], *, progress: Progress = silent
) -> Mapping[int, Floats]:
    """Weights [H_S, H_R] of least total variation of each guided receiver layer, from the sender layer of `layers`."""
    found = {}
    progress("fitting weights", 0, len(guided))
    for done, layer in enumerate(guided, 1):
        sources = samples.sender[layers[layer]].astype(np.float64)
        found[layer] = fit_total_variation(sources, samples.receiver[layer].astype(np.float64))
        progress("fitting weights", done, len(guided))
    return found
