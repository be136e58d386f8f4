"""What sets a run apart from the dense one."""

import math

import pytest
import torch

from engines.reuse.study.runs import distance


def test_a_token_that_the_exact_run_rules_out_adds_nothing():
    exact = torch.tensor([[0.5, 0.5, 0.0]]).log()
    found = torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert distance(exact, found)[0] == pytest.approx(0.5 * math.log(2))
    assert distance(exact, exact)[0] == 0
    # What only the other run rules out is infinitely far.
    assert distance(found, exact)[0] == math.inf
