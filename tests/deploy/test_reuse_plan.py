"""From the pairs of the stack's file to what each worker is told."""

import json

import numpy as np
import pytest
from pydantic import ValidationError

from crossfill.config import StackConfig
from crossfill.errors import StartError
from crossfill.plan import make_plan
from crossfill.ports import Ports
from crossfill.reuse_plan import reuse_settings
from engines.reuse.artifact import Manifest, Measured, write_artifact
from engines.reuse.identity import read_identity
from engines.reuse.refusal import Refusal
from engines.reuse.settings import VARIABLE, ReuseSettings, Weights
from router.dispatch.reuse_outcome import ReuseReason


def write_model(folder, layers, tokenizer="{}"):
    folder.mkdir()
    config = {"num_hidden_layers": layers, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(folder.name.encode())
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


@pytest.fixture
def folders(tmp_path):
    sizes = {"large": 8, "small": 6, "tiny": 5}
    return {name: write_model(tmp_path / name, layers) for name, layers in sizes.items()}


def stack(folders, *pairs, **more):
    models = [{"name": name, "source": str(folder)} for name, folder in folders.items()]
    config = {"models": models, "reuse": {"pairs": list(pairs)}, "store": {"url": "lmdb:///tmp/nowhere"}, **more}
    return StackConfig.model_validate(config)


def settle(folders, *pairs):
    return reuse_settings(stack(folders, *pairs), {str(folder): folder for folder in folders.values()})


def test_the_router_knows_every_reason_of_a_worker():
    assert {reason.value for reason in ReuseReason} == {reason.value for reason in Refusal} | {"other"}


PAIR = {"sender": "large", "receiver": "small", "first_layer": 2}


def test_a_sender_publishes_what_its_receivers_want_and_no_more(folders):
    told = settle(folders, PAIR, {"sender": "large", "receiver": "tiny", "layers": [0, 1, 2, 3, 7], "first_layer": 3})
    # Suffix alignment: layers 2, 3 and 4 of six are guided by 4, 5 and 6 of eight; tiny's layer 3 by 3.
    assert told["large"].publish == (3, 4, 5, 6)
    assert told["large"].pairs == ()
    assert dict(told["small"].pairs[0].guided) == {2: 4, 3: 5, 4: 6}
    assert dict(told["tiny"].pairs[0].guided) == {3: 3}
    assert told["small"].publish == ()


def test_a_model_may_be_receiver_and_sender(folders):
    told = settle(folders, PAIR, {"sender": "small", "receiver": "tiny", "first_layer": 2})
    assert told["small"].publish == (3, 4)
    assert told["small"].pairs[0].sender.name == "large"


def test_a_sender_packs_the_maps_that_some_pair_wants_as_much_as_the_one_that_wants_most(folders):
    by_map = {**PAIR, "mode": "map", "map_top_p": 0.8}
    other = {"sender": "large", "receiver": "tiny", "layers": [0, 1, 2, 4, 7], "first_layer": 3}
    told = settle(folders, by_map, {**other, "mode": "hybrid", "map_top_p": 0.9})
    assert told["large"].publish_maps == {4: 0.9, 5: 0.8, 6: 0.8}
    assert told["small"].publish_maps == {}
    assert (told["small"].has_maps, told["large"].has_maps) == (True, True)
    assert settle(folders, PAIR)["large"].publish_maps == {}
    assert not settle(folders, PAIR)["large"].has_maps


@pytest.mark.parametrize("mode", ["guided", "map"])
def test_only_workers_that_use_maps_take_models_that_can_do_without_queries(folders, tmp_path, mode):
    config = stack(folders, {**PAIR, "mode": mode})
    with Ports(config.first_worker_port) as ports:
        plan = make_plan(config, {str(folder): folder for folder in folders.values()}, tmp_path / "state", ports)
    package = {spec.model: spec.environment.get("SGLANG_EXTERNAL_MODEL_PACKAGE") for spec in plan.workers}
    wanted = "engines.mapped_models" if mode == "map" else None
    assert package == {"large": None, "small": wanted, "tiny": None}


def test_workers_are_told_what_is_compared_and_by_default_that_is_nothing(folders):
    sources = {str(folder): folder for folder in folders.values()}
    quiet = reuse_settings(stack(folders, PAIR), sources)
    assert not quiet["small"].is_shadowed
    told = reuse_settings(stack(folders, reuse={"pairs": [PAIR], "shadow": {"share": 0.25, "window": 9}}), sources)
    assert (told["small"].shadow.share, told["small"].shadow.window) == (0.25, 9)
    # The sender takes nothing, so it has nothing to compare.
    assert [told[name].is_shadowed for name in ("small", "large")] == [True, False]


def test_models_without_a_pair_are_told_nothing(folders):
    assert sorted(settle(folders, PAIR)) == ["large", "small"]
    assert settle(folders) == {}


def test_workers_get_it_in_their_environment(folders, tmp_path):
    config = stack(folders, PAIR, listen={"port": 0})
    with Ports(31900) as ports:
        plan = make_plan(config, {str(folder): folder for folder in folders.values()}, tmp_path, ports)
    told = {child.name: child.environment.get(VARIABLE) for child in plan.workers}
    assert told["tiny/0"] is None
    settings = ReuseSettings.model_validate_json(told["small/0"])
    assert settings.store.url == "lmdb:///tmp/nowhere"
    assert not any("lmdb" in part for child in plan.workers for part in child.command)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ({"layers": [0, 1, 2, 3, 4]}, "layers names 5, .* small has: 6"),
        ({"layers": [0, 1, 2, 3, 4, 8]}, "names one that large lacks"),
        ({"first_layer": 6}, "no layer is left"),
    ],
)
def test_layers_that_do_not_fit_are_said_before_anything_starts(folders, pair, said):
    with pytest.raises(StartError, match=said):
        settle(folders, {**PAIR, **pair})


def test_models_that_do_not_share_a_tokenizer_are_no_pair(folders):
    (folders["small"] / "tokenizer.json").write_text("[]")
    with pytest.raises(StartError, match="large and small have different tokenizers"):
        settle(folders, PAIR)


def test_a_model_must_lie_in_a_folder(folders):
    with pytest.raises(StartError, match="large must lie in a local folder, org/large is none"):
        reuse_settings(stack(folders, PAIR), {str(f): "org/large" if n == "large" else f for n, f in folders.items()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reuse": {"pairs": [{**PAIR, "sender": "larg"}]}}, "no model 'larg' .*; did you mean 'large'"),
        ({"reuse": {"pairs": [{**PAIR, "sender": "small"}]}}, "sender and receiver"),
        ({"store": {"url": "memory://"}}, "memory:// is within one process"),
        ({"reuse": {"pairs": [{**PAIR, "layers": "prefix"}]}}, "suffix"),
    ],
)
def test_a_file_that_cannot_work_is_refused(folders, change, said):
    with pytest.raises(ValidationError, match=said):
        stack(folders, PAIR, **change)


def calibrated(folders, place, **changed):
    """An artifact of large and small."""
    identities = {name: read_identity(name, folders[name]) for name in ("large", "small")}
    gate = (Measured(name="kl", limit=1, value=0, passed=True),)
    told = {"sender": identities["large"], "receiver": identities["small"], "gate": gate, **changed}
    manifest = Manifest(**told, layers=(0, 1, 2, 3, 5, 7), first_layer=2, top_p=0.9, min_tokens=128, max_density=0.6)
    write_artifact(place, manifest, {layer: np.full((4, 4), 0.25, np.float32) for layer in (2, 3, 4)})
    return {"sender": "large", "receiver": "small", "artifact": str(place)}


def test_an_artifact_says_how_a_pair_is_used(folders, tmp_path):
    told = settle(folders, calibrated(folders, tmp_path / "pair"))
    [pair] = told["small"].pairs
    assert (pair.layers, pair.first_layer, pair.top_p) == ((0, 1, 2, 3, 5, 7), 2, 0.9)
    assert (pair.min_tokens, pair.max_density, pair.weights, pair.refused) == (128, 0.6, Weights.FITTED, None)
    assert pair.artifact == str(tmp_path / "pair")
    assert told["large"].publish == (2, 3, 5)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"gate": ()}, Refusal.GATE_FAILED),
        ({"gate": (Measured(name="kl", limit=1, value=2, passed=False),)}, Refusal.GATE_FAILED),
    ],
    ids=["nothing measured", "failed"],
)
def test_a_pair_whose_gate_failed_is_refused_and_its_sender_publishes_nothing(folders, tmp_path, changed, reason):
    told = settle(folders, calibrated(folders, tmp_path / "pair", **changed))
    assert told["small"].pairs[0].refused is reason
    assert told["large"].publish == ()


def test_an_artifact_of_other_weights_is_refused(folders, tmp_path):
    pair = calibrated(folders, tmp_path / "pair")
    (folders["large"] / "model.safetensors").write_bytes(b"tuned")
    assert settle(folders, pair)["small"].pairs[0].refused is Refusal.ARTIFACT_MISMATCH


def test_an_artifact_that_cannot_be_read_is_said_before_anything_starts(folders, tmp_path):
    pair = calibrated(folders, tmp_path / "pair")
    (tmp_path / "pair" / "pair.json").unlink()
    with pytest.raises(StartError, match=r"reuse.pairs: .*pair.json: cannot be read"):
        settle(folders, pair)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ({"artifact": "somewhere", "top_p": 0.5, "weights": "uniform"}, "artifact says top_p, weights already"),
        ({"weights": "fitted"}, "name its folder by artifact"),
    ],
)
def test_an_artifact_stands_alone(folders, pair, said):
    with pytest.raises(ValidationError, match=said):
        stack(folders, {"sender": "large", "receiver": "small", **pair})
