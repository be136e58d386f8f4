"""A calibration as the JSON file that the router reads."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from router.decision.scorers.inputs import INPUT_NAMES, INPUTS_VERSION
from router.decision.scorers.learned import Artifact, Inputs, Training

if TYPE_CHECKING:
    from collections.abc import Mapping

    from crossfill.router_calibration.calibrate import Calibrated, Measured


def artifact_of(result: Calibrated, names: Mapping[str, str]) -> Artifact:
    """The artifact of `result`, with the models called by the router's `names` where these say so."""
    ladder = [names.get(name, name) for name in result.held_out.ladder]
    fitted, wanted = result.fitted, result.wanted
    return Artifact(
        kind="crossfill-learned-scorer",
        format=1,
        inputs=Inputs(version=INPUTS_VERSION, names=INPUT_NAMES, mean=fitted.mean, scale=fitted.scale),
        models=dict(zip(ladder, fitted.models, strict=True)),
        training=Training(
            data=result.data.name,
            data_sha256=result.data.sha256,
            prompts=result.trained_on,
            held_out=len(result.held_out.prompts),
            seed=wanted.seed,
            regularisation=dict(zip(ladder, fitted.penalties, strict=True)),
        ),
        routing={
            "ladder": ladder,
            "tau": result.tau,
            "sigma": wanted.sigma,
            "target_large_share": wanted.target_large_share,
        },
        metrics=_metrics(result, ladder),
        created_with={
            "crossfill": version("crossfill"),
            "python": platform.python_version(),
            "scikit-learn": version("scikit-learn"),
        },
    )


def _metrics(result: Calibrated, ladder: list[str]) -> dict[str, Any]:
    routing = result.routing
    return {
        "models": {
            name: {
                "mean_score": model.mean_score,
                "auc": model.auc,
                "brier": model.brier,
                "calibration_error": model.calibration.error,
            }
            for name, model in zip(ladder, result.models, strict=True)
        },
        "apgr": _measured(routing.apgr),
        "apgr_cross_validated": routing.apgr_cross_validated,
        "cpt50": _measured(routing.cpt50),
        "cpt80": _measured(routing.cpt80),
        "large_share": _measured(routing.large_share),
        "recovered": _measured(routing.recovered),
        "shares": dict(zip(ladder, routing.shares, strict=True)),
    }


def _measured(figure: Measured) -> dict[str, Any]:
    interval = figure.interval
    return {"value": figure.value, "interval_95": None if interval is None else [interval.low, interval.high]}
