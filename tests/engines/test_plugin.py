"""What reuse does not work with is said at start."""

from types import SimpleNamespace

import pytest

from engines.compat import TARGETS
from engines.plugin import _hooks, _hooks_for, _shadow_hooks, _unsuited
from engines.reuse.settings import ReuseSettings, ShadowSettings

from .reuse.conftest import SMALL, make_pair

SUITED = {
    "tp_size": 1,
    "pp_size": 1,
    "speculative_algorithm": None,
    "enable_mixed_chunk": False,
    "disable_overlap_schedule": True,
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
}


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({}, None),
        ({"tp_size": 2}, "tensor parallelism"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"enable_mixed_chunk": True}, "mixed chunks"),
        ({"disable_overlap_schedule": False}, "overlap schedule"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"enable_hierarchical_cache": True}, "hierarchical cache"),
        ({"enable_lmcache": True}, "LMCache"),
    ],
)
def test_an_option_that_changes_what_is_computed_is_named(change, option):
    assert _unsuited(SimpleNamespace(**{**SUITED, **change})) == option


def test_every_hook_is_on_a_target_that_is_checked_at_start():
    checked = {target.replace(":", ".") for target in TARGETS}
    assert {*_hooks(), *_shadow_hooks()} <= checked


@pytest.mark.parametrize(("share", "hooked"), [(0.0, False), (0.5, True)])
def test_a_worker_that_compares_nothing_has_no_hooks_for_it(share, hooked):
    settings = settings_of(make_pair(), share)
    assert (set(_shadow_hooks()) <= set(_hooks_for(settings))) == hooked
    refused = settings_of(make_pair(refused="gate_failed"), share)
    assert not set(_shadow_hooks()) & set(_hooks_for(refused))


def settings_of(pair, share):
    return ReuseSettings(model=SMALL, pairs=(pair,), shadow=ShadowSettings(share=share))
