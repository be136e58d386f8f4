from __future__ import annotations

from typing import Any

import pytest

from router.config import RouterConfig
from router.decision.decider import Decider
from router.decision.policy import Reason, Situation
from router.decision.scorers.heuristic import HeuristicScorer
from router.errors import ModelNotFoundError, ReuseUnavailableError
from router.request.generation import parse_chat

LADDER = ["small", "middle", "large"]
HARD = "Prove that the square root of 2 is irrational, step by step."


def decide(
    situation: Situation,
    *,
    model: str = "auto",
    unavailable: tuple[str, ...] = (),
    reusing: tuple[str, ...] = (),
    crossfill: Any = None,
    **routing: Any,
) -> Any:
    models = [{"name": name, "workers": ["http://a:1"]} for name in LADDER]
    models[2]["cost"] = {"input": 1.0, "output": 2.0}
    config = RouterConfig.model_validate({"models": models, "routing": {"ladder": LADDER, "sigma": 0.0, **routing}})
    asked = {"model": model, "messages": [{"role": "user", "content": HARD}], "max_tokens": 10, "crossfill": crossfill}
    chat = parse_chat(asked, config.limits)
    return Decider(config, HeuristicScorer()).prepare(chat, "r", situation, reusing)(unavailable)


def test_pinned_conversation_stays_until_its_model_is_gone() -> None:
    pinned = Situation(pinned="small")
    assert decide(Situation(), tau=0.1).model == "large"
    assert decide(pinned, tau=0.1).reason is Reason.STICKY
    moved = decide(pinned, tau=0.1, unavailable=("small",))
    assert (moved.model, moved.reason, moved.pinned) == ("large", Reason.THRESHOLD_LARGE, "small")


def test_model_named_by_the_client_wins_over_a_pin() -> None:
    named = decide(Situation(pinned="small"), model="large")
    assert (named.model, named.reason, named.pinned) == ("large", Reason.EXPLICIT, None)


def test_waiting_time_counts_by_its_weight() -> None:
    slow = Situation(expected_ttft_s={"small": 0.1, "middle": 0.2, "large": 9.87654321, "unknown": 1.0})
    assert decide(slow, tau=0.1).model == "large"
    weighed = decide(slow, tau=0.1, ttft_weight=0.1)
    assert weighed.model == "middle"
    assert weighed.expected_ttft_s == {"small": 0.1, "middle": 0.2, "large": 9.8765}


def test_costs_that_are_configured_are_told_even_if_they_do_not_count() -> None:
    decision = decide(Situation())
    assert list(decision.cost) == ["large"]
    assert decision.cost_weight == 0
    assert "cost_weight" not in decision.to_json()


def require(*reusing: str, model: str = "auto", **more: Any) -> Any:
    return decide(Situation(), model=model, reusing=reusing, crossfill={"reuse": "require"}, **more)


def test_required_reuse_leaves_only_models_that_can() -> None:
    assert decide(Situation(), tau=0.1).model == "large"
    assert decide(Situation(), tau=0.1, reusing=("small",)).model == "large"
    lone = require("small", tau=0.1)
    assert (lone.model, lone.reason, lone.unavailable) == ("small", Reason.ONLY_HEALTHY, ("middle", "large"))
    assert require("middle", "small", tau=0.1).model == "middle"
    assert require("middle", "small", tau=0.1, unavailable=("middle",)).model == "small"
    # None of them can serve now: they are named all the same.
    assert require("middle", "small", tau=0.1, unavailable=("middle", "small")).model == "middle"
    assert require("small", model="small").reason is Reason.EXPLICIT


@pytest.mark.parametrize(
    ("reusing", "model"), [((), "auto"), ((), "small"), (("small",), "large"), (("else",), "auto")]
)
def test_required_reuse_that_no_model_can_do_is_refused(reusing: tuple[str, ...], model: str) -> None:
    with pytest.raises(ReuseUnavailableError):
        require(*reusing, model=model)


def test_unknown_model_is_refused() -> None:
    with pytest.raises(ModelNotFoundError):
        decide(Situation(), model="huge")
