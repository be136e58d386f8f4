"""How dense a plan is said to be, and what is refused for it."""

import pytest

from cache_store.client.fetch import Fetch
from engines.reuse.receiver import _expected
from engines.reuse.refusal import Refusal

from .conftest import make_pair
from .test_receiver import GUIDED, TOTAL, left  # noqa: F401  # a fixture
from .test_sender import TOKENS


def test_density_is_that_of_the_row_blocks_that_are_planned(left, receive):  # noqa: F811
    worker = receive(top_p=0.6)
    for request, prefix in (("all", 0), ("rest", 256)):
        worker.arrive(request, TOKENS)
        worker.wait()
        worker.engine.admit(request, prefix, TOTAL)
    told = [float(worker.engine.outcome(request).split("density=")[1].split(";")[0]) for request in ("all", "rest")]
    # Early row blocks have little to leave out.
    assert told[1] < told[0]


def test_a_plan_is_as_dense_as_all_layers_will_be_not_as_those_that_have_come():
    kept = {2: 0.8, 3: 0.6}
    assert _expected(kept, {}) == pytest.approx(0.7)
    usual = {2: 0.8, 3: 0.6, 4: 0.2, 5: 0.4}
    assert _expected(kept, usual) == pytest.approx(0.5)
    assert _expected({2: 0.4}, usual) == pytest.approx(0.25)
    assert _expected({4: 0.6}, usual) == 1.0


def test_a_pair_whose_first_layers_are_dense_is_not_refused_for_them(left, receive, monkeypatch):  # noqa: F811
    first = make_pair().guided[GUIDED[0]]
    monkeypatch.setattr(Fetch, "ready", lambda _, sender: sender == first)
    usual = {layer: 0.9 if layer == GUIDED[0] else 0.1 for layer in GUIDED}
    for layer_density, refusal in (({}, Refusal.TOO_DENSE), (usual, None)):
        worker = receive(max_density=0.5, layer_density=layer_density)
        worker.arrive("r", TOKENS)
        worker.wait()
        assert worker.engine.admit("r", 0, TOTAL) is refusal
