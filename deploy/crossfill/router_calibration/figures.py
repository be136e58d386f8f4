"""The plots of a calibration, as SVG that stands inside an HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfill.plots import COLOURS, GREY, colour, panels, svg

if TYPE_CHECKING:
    from crossfill.router_calibration.calibrate import Calibrated


def cost_quality(result: Calibrated) -> str:
    """Mean score against the share of strong calls: this scorer, random routing and an oracle."""
    figure, [axes] = panels(1)
    routing = result.routing
    curve, oracle = routing.curve, routing.oracle
    axes.plot(oracle.shares, oracle.scores, color=COLOURS[2], label="oracle", linestyle=":")
    axes.plot(curve.shares, curve.scores, color=COLOURS[0], label="this scorer")
    axes.plot([0, 1], [curve.scores[0], curve.scores[-1]], color=GREY, label="random", linestyle="--")
    if routing.recovered.value is not None and routing.large_share.value is not None:
        reached = curve.scores[0] + routing.recovered.value * (curve.scores[-1] - curve.scores[0])
        axes.plot(routing.large_share.value, reached, "o", color=COLOURS[1], label="the policy at tau")
    axes.set_xlabel(f"share of queries sent to {result.held_out.ladder[-1]}")
    axes.set_ylabel("mean score")
    axes.legend()
    return svg(figure, "cost-quality")


def calibration(result: Calibrated) -> str:
    """Observed against predicted quality, in ten bins for each model."""
    figure, [axes] = panels(1)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", label="perfect")
    for index, model in enumerate(result.models):
        bins = model.calibration
        axes.plot(bins.predicted, bins.observed, "o-", color=colour(index), label=model.name)
    axes.set_xlabel("predicted quality")
    axes.set_ylabel("mean score")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.legend()
    return svg(figure, "calibration")


def distributions(result: Calibrated) -> str:
    """Predicted qualities of each model, and the lead of the strongest over the weakest with tau."""
    figure, [qualities, leads] = panels(2)
    for index, model in enumerate(result.models):
        qualities.hist(result.quality[:, index], bins=20, alpha=0.6, color=colour(index), label=model.name)
    qualities.set_xlabel("predicted quality")
    qualities.set_ylabel("held-out queries")
    qualities.legend()
    steps = len(result.models) - 1
    leads.hist(result.quality[:, -1] - result.quality[:, 0], bins=20, color=COLOURS[0], alpha=0.6)
    leads.axvline(result.tau * steps, color=COLOURS[1], label="tau" if steps == 1 else f"{steps} tau")
    leads.set_xlabel(f"{result.held_out.ladder[-1]} ahead of {result.held_out.ladder[0]}")
    leads.legend()
    return svg(figure, "distributions")
