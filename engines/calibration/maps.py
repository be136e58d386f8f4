"""Mixtures of heads fitted to whole attention maps, as MapFlow has them (§ Calibration), in bounded memory.

Squared errors are over all entries, whose moments are added up in one pass; total variation, which needs the entries
again and again, is over those of some rows that are spread over each text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from engines.calibration.moments import Moments, moments_of_maps
from engines.calibration.observation import observe
from engines.calibration.simplex import fit_squares, fit_total_variation, squared_errors, total_variations
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from engines.calibration.journal import Journal
    from engines.calibration.observation import Layer, Observation
    from engines.reuse.study.network import Network

    Floats = npt.NDArray[np.float64]

# Of a text's maps, whatever its length: 16 rows of 1,024 tokens.
_ENTRIES = 2**13


@dataclass(frozen=True)
class MapFit:
    """Of one receiver layer.

    Attributes:
        weights: [H_S, H_R].
        variation: total variation from its mixture on rows of the texts, mean of heads.
        unexplained: squared error as a share of the maps' own squares, mean of heads, all entries.
    """

    weights: Floats
    variation: float
    unexplained: float


def fit_maps(
    networks: tuple[Network, Network],
    texts: Sequence[Sequence[int]],
    guided: Mapping[int, int],
    journal: Journal,
    *,
    progress: Progress = silent,
) -> Mapping[int, MapFit]:
    """Fit each guided receiver layer to the sender layer that `guided` names.

    Args:
        networks: sender and receiver.
        texts: token ids.
        guided: sender layer of each receiver layer.
        journal: of what was found; of all texts together, as maps are too large to keep.
        progress: told of every text and layer.
    """
    given = [[list(text) for text in texts], sorted(guided.items()), _ENTRIES]
    found = journal.get("fit maps", given, partial(_fit, networks, texts, guided, progress))
    return {
        layer: MapFit(
            found[f"{layer}"].astype(np.float64),
            float(found[f"{layer} variation"]),
            float(found[f"{layer} unexplained"]),
        )
        for layer in guided
    }


def _fit(
    networks: tuple[Network, Network], texts: Sequence[Sequence[int]], guided: Mapping[int, int], progress: Progress
) -> dict[str, Floats]:
    wholes: dict[int, Moments] = {}
    entries: dict[int, list[tuple[Floats, Floats]]] = {layer: [] for layer in guided}
    total = len(texts) + len(guided)
    progress("fitting maps", 0, total)
    for done, text in enumerate(texts, 1):
        theirs, own = observe(networks[0], text, set(guided.values())), observe(networks[1], text, set(guided))
        for layer, pair in _pairs(theirs, own, guided).items():
            moments = moments_of_maps(*pair)
            wholes[layer] = wholes[layer] + moments if layer in wholes else moments
            entries[layer].append(_entries(pair))
        progress("fitting maps", done, total)
    found: dict[str, Floats] = {}
    for done, layer in enumerate(guided, len(texts) + 1):
        gram, cross, power = (
            np.asarray(one.numpy()) for one in (wholes[layer].gram, wholes[layer].cross, wholes[layer].power)
        )
        sources, targets = (np.concatenate(of, axis=1) for of in zip(*entries.pop(layer), strict=True))
        weights = fit_total_variation(sources, targets, fit_squares(gram, cross))
        found[f"{layer}"] = weights
        found[f"{layer} variation"] = total_variations(sources, targets, weights).mean()
        found[f"{layer} unexplained"] = (squared_errors(gram, cross, power, weights) / power).mean()
        progress("fitting maps", done, total)
    return found


def _pairs(theirs: Observation, own: Observation, guided: Mapping[int, int]) -> dict[int, tuple[Layer, Layer]]:
    return {layer: (theirs.layers[of], own.layers[layer]) for layer, of in guided.items()}


def _entries(pair: tuple[Layer, Layer]) -> tuple[Floats, Floats]:
    """[H_S, M] and [H_R, M] of rows at even distances, the last one among them."""
    tokens = pair[0].query.shape[0]
    count = max(1, min(tokens, 2 * _ENTRIES // tokens))
    rows = [tokens * (place + 1) // count - 1 for place in range(count)]
    theirs, own = (
        np.concatenate([layer.map(row, row + 1)[:, 0].double().numpy() for row in rows], axis=1) for layer in pair
    )
    return theirs, own
