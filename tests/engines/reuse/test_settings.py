"""What a worker is told: wrong pairs are refused before anything starts."""

import pytest
from pydantic import ValidationError

from engines.config import WorkerConfig
from engines.reuse.settings import VARIABLE, ReuseSettings, Weights, align_suffix

from .conftest import LARGE, SMALL, make_pair


def test_guided_are_the_layers_between_the_first_ones_and_the_last():
    assert dict(make_pair().guided) == {2: 4, 3: 5, 4: 6}


@pytest.mark.parametrize(
    ("receiver", "sender", "layers"), [(3, 5, (2, 3, 4)), (5, 5, (0, 1, 2, 3, 4)), (5, 3, (0, 0, 0, 1, 2))]
)
def test_layers_are_counted_from_the_last(receiver, sender, layers):
    assert align_suffix(receiver, sender) == layers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": (0, 1, 2, 3, 4, 99)}, "layers names one that large lacks"),
        ({"first_layer": 5}, "no layer is left"),
        ({"top_p": 0.0}, "greater than 0"),
        ({"layer_top_p": {0: 0.9}}, "not guided"),
        ({"layer_density": {2: 0.5}}, "other layers than are guided"),
        ({"nonsense": 1}, "Extra inputs"),
    ],
)
def test_a_pair_that_cannot_work_is_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        make_pair(**changes)


def test_settings_that_do_not_fit_their_model_are_refused():
    with pytest.raises(ValidationError, match="names 5 layers, small has 6"):
        ReuseSettings(model=SMALL, pairs=(make_pair(layers=(0, 1, 2, 3, 4)),))
    with pytest.raises(ValidationError, match="publish names a layer that large lacks"):
        ReuseSettings(model=LARGE, publish=(8,))
    with pytest.raises(ValidationError, match="takes from large by two pairs"):
        ReuseSettings(model=SMALL, pairs=(make_pair(), make_pair(top_p=0.5)))
    other = LARGE.model_copy(update={"heads": 9})
    with pytest.raises(ValidationError, match="identity weights need as many heads"):
        ReuseSettings(model=SMALL, pairs=(make_pair(sender=other, weights=Weights.IDENTITY),))


def test_a_worker_is_told_by_its_environment():
    settings = ReuseSettings(model=SMALL, pairs=(make_pair(),))
    config = WorkerConfig(model_path="m", name="small", port=1, reuse=settings)
    assert ReuseSettings.model_validate_json(config.environment()[VARIABLE]) == settings
    assert VARIABLE not in WorkerConfig(model_path="m", name="small", port=1).environment()


@pytest.mark.parametrize(
    ("device", "chosen", "reuse", "backend", "inner"),
    [
        ("cpu", None, True, "crossfill", None),
        ("cpu", "torch_native", True, "crossfill", "torch_native"),
        ("cpu", "torch_native", False, "torch_native", None),
        ("cuda", None, True, "crossfill", "triton"),
        ("cuda", "flashinfer", True, "crossfill", "flashinfer"),
        ("cuda", None, False, None, None),
    ],
)
def test_reuse_runs_beside_the_backend_that_was_chosen(device, chosen, reuse, backend, inner):
    settings = ReuseSettings(model=SMALL, pairs=(make_pair(),)) if reuse else None
    config = WorkerConfig(model_path="m", name="s", port=1, device=device, attention_backend=chosen, reuse=settings)
    arguments = config.sglang_args()
    given = arguments[arguments.index("--attention-backend") + 1] if "--attention-backend" in arguments else None
    assert (given, config.environment().get("CROSSFILL_INNER_BACKEND")) == (backend, inner)
