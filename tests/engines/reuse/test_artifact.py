"""The artifact of a pair: what is read is what was written, and nothing that does not fit together is read at all."""

import json

import numpy as np
import pytest

from engines.errors import PairArtifactError
from engines.models.safetensors_file import array_tensor, write
from engines.reuse.artifact import (
    MANIFEST,
    WEIGHTS,
    DataSource,
    Manifest,
    Measured,
    _digest,
    read_manifest,
    read_weights,
    write_artifact,
)
from engines.reuse.settings import ModelIdentity

LARGE = ModelIdentity(name="large", revision="l1", tokenizer="t", template="", layers=6, heads=3)
SMALL = ModelIdentity(name="small", revision="s1", tokenizer="t", template="x", layers=5, heads=2)
GOOD = Measured(name="kl", limit=0.01, value=0.002, low=0.001, high=0.003, passed=True)
BAD = Measured(name="recall", limit=0.05, value=0.2, passed=False)


def manifest(**changed):
    told = {
        "sender": LARGE,
        "receiver": SMALL,
        "layers": (0, 1, 2, 4, 5),
        "first_layer": 2,
        "top_p": 0.95,
        "min_tokens": 512,
        "max_density": 0.7,
        "gate": (GOOD,),
        "data": (DataSource(purpose="gate", name="reference", digest="d", tokens=9),),
        "seconds": {"fit": 1.5},
    }
    return Manifest.model_validate({**told, **changed})


def weights(layers=(2, 3)):
    generator = np.random.default_rng(0)
    return {layer: generator.dirichlet(np.ones(3), 2).T.astype(np.float32) for layer in layers}


def test_what_is_read_is_what_was_written(tmp_path):
    folder, given = tmp_path / "new" / "pair", weights()
    written = write_artifact(folder, manifest(), given)
    assert read_manifest(folder) == written
    assert written.weights_digest
    assert written == manifest(weights_digest=written.weights_digest)
    found = read_weights(folder, written)
    assert list(found) == [2, 3]
    assert all(np.array_equal(found[layer], given[layer]) for layer in given)
    assert {file.name for file in folder.iterdir()} == {MANIFEST, WEIGHTS}
    again = write_artifact(folder, manifest(), {2: given[3], 3: given[2]})
    assert again.weights_digest != written.weights_digest
    with pytest.raises(PairArtifactError, match="calibrate again"):
        read_weights(folder, written)


@pytest.mark.parametrize(("gate", "passed"), [((GOOD,), True), ((), False), ((GOOD, BAD), False)])
def test_a_pair_passes_iff_something_was_measured_and_all_of_it_sufficed(gate, passed):
    assert manifest(gate=gate).passed is passed


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True),
        ({"name": "renamed", "template": "other"}, True),
        ({"revision": "l2"}, False),
        ({"tokenizer": "u"}, False),
        ({"heads": 4}, False),
        ({"layers": 7}, False),
    ],
)
def test_an_artifact_is_of_weights_and_tokenizers_and_not_of_names(changed, same):
    assert manifest().is_of(LARGE.model_copy(update=changed), SMALL) is same
    assert not manifest().is_of(SMALL, LARGE)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": (0, 1, 2)}, "names 3, small has 5"),
        ({"layers": (0, 1, 2, 4, 6)}, "one that large lacks"),
        ({"first_layer": 4}, "no layer is left"),
        ({"receiver": SMALL.model_copy(update={"tokenizer": "u"})}, "different tokenizers"),
        ({"top_p": 0}, "top_p"),
        ({"layer_top_p": {4: 0.9}}, "not guided"),
        ({"layer_top_p": {2: 1.5}}, "layer_top_p"),
        ({"layer_density": {2: 0.5}}, "other layers than are guided"),
        ({"gate": [{**GOOD.model_dump(), "value": float("nan")}]}, "finite"),
    ],
)
def test_a_manifest_that_does_not_fit_itself_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        manifest(**changed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (weights((2,)), r"layers \[2\], want \[2, 3\]"),
        ({2: np.full((2, 2), 0.5, np.float32), 3: weights()[3]}, r"\[2, 2\], want \[3, 2\]"),
        ({2: np.full((3, 2), 0.5, np.float32), 3: weights()[3]}, "sum to 1"),
        ({2: np.array([[2, 2], [-1, -1], [0, 0]], np.float32), 3: weights()[3]}, "at least 0"),
        ({2: np.full((3, 2), np.nan, np.float32), 3: weights()[3]}, "at least 0"),
    ],
)
def test_weights_that_do_not_fit_are_not_written(tmp_path, given, said):
    with pytest.raises(PairArtifactError, match=said):
        write_artifact(tmp_path, manifest(), given)
    assert not list(tmp_path.iterdir())


def changed(folder, **fields):
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "crossfill calibrate pair"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "JSON"),
        (lambda folder: changed(folder, format=2), "format"),
        (lambda folder: changed(folder, more=1), "more"),
        (lambda folder: (folder / WEIGHTS).unlink(), "cannot be read"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x" + (folder / WEIGHTS).read_bytes()[1:]), "calibrate again"),
        (lambda folder: changed(folder, first_layer=1), r"want \[1, 2, 3\]"),
    ],
    ids=["no manifest", "half a manifest", "another format", "an unknown key", "no weights", "damaged", "other layers"],
)
def test_files_that_cannot_be_used_are_said_with_their_path(tmp_path, damage, said):
    write_artifact(tmp_path, manifest(), weights())
    read_weights(tmp_path, read_manifest(tmp_path))
    damage(tmp_path)
    with pytest.raises(PairArtifactError, match=said) as caught:
        read_weights(tmp_path, read_manifest(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_layer_with_two_matrices_is_refused(tmp_path):
    given = weights()
    tensors = [array_tensor(name, given[int(name)]) for name in ("2", "3", "03")]
    write(tmp_path / WEIGHTS, tensors, lambda _done, _total: None)
    told = manifest(weights_digest=_digest(tmp_path / WEIGHTS))
    with pytest.raises(PairArtifactError, match="two tensors are of one layer"):
        read_weights(tmp_path, told)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PairArtifactError, match="cannot be written"):
        write_artifact(tmp_path / "file" / "pair", manifest(), weights())
