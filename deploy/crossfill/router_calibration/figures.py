"""The plots of a calibration, as SVG that stands inside an HTML page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from crossfill.router_calibration.calibrate import Calibrated

# Okabe and Ito's palette: distinct for colour-blind readers too.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY = "#777777"


def cost_quality(result: Calibrated) -> str:
    """Mean score against the share of strong calls: this scorer, random routing and an oracle."""
    figure, axes = _figure(1)
    routing = result.routing
    curve, oracle = routing.curve, routing.oracle
    axes.plot(oracle.shares, oracle.scores, color=_COLOURS[2], label="oracle", linestyle=":")
    axes.plot(curve.shares, curve.scores, color=_COLOURS[0], label="this scorer")
    axes.plot([0, 1], [curve.scores[0], curve.scores[-1]], color=_GREY, label="random", linestyle="--")
    if routing.recovered.value is not None and routing.large_share.value is not None:
        reached = curve.scores[0] + routing.recovered.value * (curve.scores[-1] - curve.scores[0])
        axes.plot(routing.large_share.value, reached, "o", color=_COLOURS[1], label="the policy at tau")
    axes.set_xlabel(f"share of queries sent to {result.held_out.ladder[-1]}")
    axes.set_ylabel("mean score")
    axes.legend()
    return _svg(figure, "cost-quality")


def calibration(result: Calibrated) -> str:
    """Observed against predicted quality, in ten bins for each model."""
    figure, axes = _figure(1)
    axes.plot([0, 1], [0, 1], color=_GREY, linestyle="--", label="perfect")
    for index, model in enumerate(result.models):
        bins = model.calibration
        axes.plot(bins.predicted, bins.observed, "o-", color=_colour(index), label=model.name)
    axes.set_xlabel("predicted quality")
    axes.set_ylabel("mean score")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.legend()
    return _svg(figure, "calibration")


def distributions(result: Calibrated) -> str:
    """Predicted qualities of each model, and the lead of the strongest over the weakest with tau."""
    figure, qualities, leads = _figure(2)
    for index, model in enumerate(result.models):
        qualities.hist(result.quality[:, index], bins=20, alpha=0.6, color=_colour(index), label=model.name)
    qualities.set_xlabel("predicted quality")
    qualities.set_ylabel("held-out queries")
    qualities.legend()
    steps = len(result.models) - 1
    leads.hist(result.quality[:, -1] - result.quality[:, 0], bins=20, color=_COLOURS[0], alpha=0.6)
    leads.axvline(result.tau * steps, color=_COLOURS[1], label="tau" if steps == 1 else f"{steps} tau")
    leads.set_xlabel(f"{result.held_out.ladder[-1]} ahead of {result.held_out.ladder[0]}")
    leads.legend()
    return _svg(figure, "distributions")


def _figure(panels: int) -> tuple[Any, ...]:
    """A figure and its axes."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = [figure.add_subplot(1, panels, panel + 1) for panel in range(panels)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, *axes


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _svg(figure: Figure, name: str) -> str:
    """SVG text; its ids carry `name`, so that several fit in one page, and equal figures are equal text."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata=nothing)
    # The XML head and the document type have no place inside HTML.
    svg = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
