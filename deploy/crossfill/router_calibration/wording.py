"""The figures of a calibration as rows of a table and as sentences, for the terminal and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossfill.router_calibration.calibrate import Calibrated, Measured


def model_rows(result: Calibrated) -> list[tuple[str, ...]]:
    """Header and a row for each model, on held-out queries."""
    rows: list[tuple[str, ...]] = [
        ("model", "score", "predicted", "AUC", "Brier", "ECE", "ECE by chance", "share at tau")
    ]
    for model, share in zip(result.models, result.routing.shares, strict=True):
        rows.append(
            (
                model.name,
                f"{model.mean_score:.3f}",
                f"{model.mean_predicted:.3f}",
                _number(model.auc),
                f"{model.brier:.3f}",
                f"{model.calibration.error:.3f}",
                f"{model.calibration.error_by_chance:.3f}",
                f"{share:.1%}",
            )
        )
    return rows


def routing_rows(result: Calibrated) -> list[tuple[str, ...]]:
    """Header and a row for each figure of routing, with its interval and what random routing has."""
    routing, share = result.routing, result.routing.large_share.value or 0.0
    return [
        ("routing", "held out", "95 % interval", "random"),
        ("APGR", _number(routing.apgr.value), _interval(routing.apgr), "0.500"),
        ("APGR, cross-validated in training", _number(routing.apgr_cross_validated), "", "0.500"),
        ("CPT(50 %)", _number(routing.cpt50.value), _interval(routing.cpt50), "0.500"),
        ("CPT(80 %)", _number(routing.cpt80.value), _interval(routing.cpt80), "0.800"),
        ("PGR at tau", _number(routing.recovered.value), _interval(routing.recovered), _number(share)),
        ("… without noise, at the same share", _number(routing.curve.recovered_at(share)), "", _number(share)),
        ("share of the strongest at tau", _number(share), _interval(routing.large_share), ""),
        ("tau", f"{result.tau:.4f}", "", ""),
    ]


def conclusions(result: Calibrated) -> list[str]:
    """What holds, and what does not, in plain words."""
    ladder, routing, wanted = result.held_out.ladder, result.routing, result.wanted
    weak, strong = ladder[0], ladder[-1]
    held = len(result.held_out.prompts)
    said = []
    if routing.apgr.value is None or routing.apgr.interval is None:
        said.append(
            f"On the {held} held-out queries {strong} is no better than {weak}: there is no gap to recover, and "
            "nothing here speaks for routing between them."
        )
    elif routing.apgr.interval.low > 0.5:
        said.append(
            f"Routing by these scores beats random routing on {held} held-out queries: APGR {routing.apgr.value:.2f}, "
            f"95 % interval {_interval(routing.apgr)}, against 0.50."
        )
    else:
        said.append(
            f"On {held} held-out queries routing by these scores cannot be told from random routing: APGR "
            f"{routing.apgr.value:.2f}, 95 % interval {_interval(routing.apgr)}, against 0.50. Do not use them as they "
            "are: give more prompts (some hundred at the least), or stay with the heuristic scorer."
        )
    if routing.recovered.value is not None and routing.large_share.value is not None:
        share = routing.large_share.value
        said.append(
            f"At tau {result.tau:.3f} with sigma {wanted.sigma:g}, {share:.1%} of the held-out queries go to {strong} "
            f"({wanted.target_large_share:.0%} were asked for). That recovers {routing.recovered.value:.0%} of the gap "
            f"between {weak} and {strong}; random routing would recover {share:.0%}, the scores without noise "
            f"{routing.curve.recovered_at(share):.0%}."
        )
    if len(ladder) > 2:
        said.append(
            f"APGR, CPT and PGR compare {weak} with {strong}; tau is the same for all neighbours, and the table of "
            "models shows what share each gets."
        )
    said.append(
        "The figures hold for queries like those in the data. Calibrate on your own traffic before you rely on them."
    )
    return said


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _interval(figure: Measured) -> str:
    return "–" if figure.interval is None else f"{figure.interval.low:.3f} to {figure.interval.high:.3f}"
