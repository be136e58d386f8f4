"""A calibration as one HTML page that needs nothing else: no network, no script, no file beside it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from crossfill.html_page import page, paragraphs, table
from crossfill.router_calibration import figures
from crossfill.router_calibration.wording import conclusions, model_rows, routing_rows

if TYPE_CHECKING:
    from crossfill.router_calibration.calibrate import Calibrated


def html_page(result: Calibrated) -> str:
    """The report."""
    data = result.data
    strong = escape(result.held_out.ladder[-1])
    body = f"""<h1>Router calibration</h1>
<p>{escape(data.name)}: {data.lines} lines, {len(data.prompts.prompts)} prompts, {result.trained_on} for training and
{len(result.held_out.prompts)} held out (seed {result.wanted.seed}). All that follows was measured on the held-out ones,
once.</p>
{paragraphs(conclusions(result))}
<h2>Figures</h2>
{table(routing_rows(result))}
{table(model_rows(result))}
<figure>{figures.cost_quality(result)}<figcaption>What sending more queries to {strong} buys. The curve starts where
all go to the weakest model. An oracle knows each answer's true score. The policy lies below the curve by what its noise
costs.</figcaption></figure>
<figure>{figures.calibration(result)}<figcaption>Predicted quality against what was observed, in ten bins of equally
many queries. On the diagonal a prediction means what it says.</figcaption></figure>
<figure>{figures.distributions(result)}<figcaption>Predicted qualities, and the lead that decides. Noise of sigma
{result.wanted.sigma:g} on each model's score blurs the threshold.</figcaption></figure>
<h2>What the words mean</h2>
<p>PGR, the performance gap recovered, is what the router gains over the weakest model, as a part of what the strongest
gains over it, in mean score. APGR is its average over all shares of calls to the strongest model; CPT(x %) is the
smallest share that recovers x % of the gap. As in RouteLLM (Ong et al. 2024). Intervals come from resampling the
held-out queries.</p>
<p>Score and predicted are means. AUC is the chance that a good answer was predicted higher than a bad one, Brier the
mean squared error of the prediction, ECE its mean distance from the diagonal of the second plot; <i>by chance</i> is
the ECE that true probabilities would show on as many queries.</p>
<footer>Data SHA-256 {data.sha256}</footer>"""
    return page(f"Crossfill router calibration: {data.name}", body)
