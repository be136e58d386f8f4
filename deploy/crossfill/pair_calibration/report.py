"""A pair's calibration as one HTML page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from crossfill.html_page import page, paragraphs, table
from crossfill.pair_calibration.wording import (
    ALIGNED,
    CANDIDATES_CAPTION,
    GATE_CAPTION,
    WAYS_CAPTION,
    candidate_rows,
    gate_rows,
    sentences,
    way_rows,
)
from crossfill.plots import GREY, colour, panels, svg
from engines.calibration.trial import Rule

if TYPE_CHECKING:
    from engines.calibration.calibration import Calibrated


def html_page(found: Calibrated) -> str:
    """The report."""
    sender, receiver = found.sender.name, found.receiver.name
    rows = [("purpose", "text", "tokens", "digest")]
    rows += [(one.purpose.value, one.name, str(sum(map(len, one.texts))), one.digest) for one in found.data]
    body = f"""<h1>{escape(sender)} → {escape(receiver)}</h1>
{paragraphs(list(sentences(found)))}
<h2>The gate</h2>
{table(gate_rows(found))}
<p>{escape(GATE_CAPTION)}</p>
<h2>What else is as dense</h2>
{table(way_rows(found))}
<p>{escape(WAYS_CAPTION)}</p>
<h2>Layers</h2>
<figure>{_layers(found)}<figcaption>How far each layer of {escape(receiver)} is from its best mixture of the heads of
each layer of {escape(sender)}: total variation of block masses, 0 is equal. Points: the layer that was taken; crosses:
if aligned {ALIGNED[found.other.name]}.</figcaption></figure>
<h2>Choice</h2>
<figure>{_choice(found)}<figcaption>What candidates leave out of all attention, and how far that takes them from the
dense run. Circled: chosen.</figcaption></figure>
{table(candidate_rows(found))}
<p>{escape(CANDIDATES_CAPTION)}</p>
<h2>Texts</h2>
{table(rows)}"""
    return page(f"Crossfill pair calibration: {sender} to {receiver}", body)


def _layers(found: Calibrated) -> str:
    figure, [axes] = panels(1)
    variation = found.profile.variation
    shown = axes.imshow(variation, aspect="auto", cmap="viridis", vmin=0, vmax=float(np.quantile(variation, 0.9)))
    layers = range(len(variation))
    axes.plot(found.other.layers, layers, "x", color="#ffffff", markersize=4)
    axes.plot(found.alignment.layers, layers, "o", color=colour(1), markersize=4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"layer of {found.sender.name}")
    axes.set_ylabel(f"layer of {found.receiver.name}")
    figure.colorbar(shown, label="total variation")
    return svg(figure, "layers")


def _choice(found: Calibrated) -> str:
    figure, [axes] = panels(1)
    layers = found.receiver.layers
    for place, rule in enumerate(Rule):
        of_rule = [one for one in found.tried if one.rule is rule]
        saved = [found.tried[one].saved(one, layers) for one in of_rule]
        far = [float(np.mean(found.tried[one].divergence)) for one in of_rule]
        axes.plot(saved, far, "o", color=colour(place), label=rule.value, markersize=4)
    chosen = found.tried[found.chosen]
    point = chosen.saved(found.chosen, layers), float(np.mean(chosen.divergence))
    axes.plot(*point, "o", markerfacecolor="none", markeredgecolor=GREY, markersize=12)
    axes.axhline(found.wanted.limits.divergence, color=GREY, linestyle="--", label="limit of the gate")
    axes.set_xlabel("share of all attention left out")
    axes.set_ylabel("KL from the dense run, nats")
    axes.set_yscale("log")
    axes.legend()
    return svg(figure, "choice")
