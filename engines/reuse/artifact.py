"""What a calibration leaves of a pair: a folder with fitted weights, and a manifest that says what they are good for.

`pair.json` names both models by their digests, how the receiver is to use the sender, what was measured on which data,
and the verdict of the gate; `weights.safetensors` has a matrix [H_S, H_R] for each guided receiver layer. The manifest
has the digest of the weights, so that neither is used without the other.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.errors import PairArtifactError
from engines.models.safetensors_file import Tensor, array_tensor, read, to_array, write
from engines.reuse.settings import ModelIdentity, ReuseMode, Share, check_layers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The stack's file is read without numpy.
Matrix: TypeAlias = "npt.NDArray[np.float32]"

MANIFEST, WEIGHTS = "pair.json", "weights.safetensors"

_DIGEST_BYTES = 16
# Of a column of weights in float32, whose sum is to be 1.
_SUM_TOLERANCE = 1e-4
# Of an identity, what two models that are the same have in common.
_PARTS = ("revision", "tokenizer", "layers", "heads")

LayerNumber = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSource(_Part):
    """Text that was used: what for, its name, the digest of its tokens, and how many those were."""

    purpose: Literal["fit", "choice", "gate"]
    name: str = Field(min_length=1)
    digest: str = Field(min_length=1)
    tokens: int = Field(ge=1)


class Measured(_Part):
    """One figure of the gate: its limit, its value on held-out data, with the 95 % interval where there is one."""

    name: str = Field(min_length=1)
    limit: Finite
    value: Finite
    low: Finite | None = None
    high: Finite | None = None
    passed: bool


class Manifest(_Part):
    """All that is known of a calibrated pair.

    Attributes:
        sender, receiver: models by digest.
        layers: of each receiver layer, the sender layer whose masses guide it.
        first_layer: receiver layers before it are computed as always, and so is the last one.
        top_p: share of attention mass that the kept blocks reach.
        layer_top_p: of guided layers where it is another one.
        mode: what of the sender's is reused.
        map_top_p: share of attention mass that maps keep, of each of the sender's heads.
        map_density: of `hybrid`, the density up to which a layer is computed by its map.
        layer_density: kept blocks of each guided layer as a share of the causal ones, as measured.
        min_tokens, max_density: bounds within which quality and gain were measured.
        weights_digest: BLAKE2b of the file of weights, hexadecimal.
        gate: every figure that was judged; the pair may be used iff there is one and all passed.
        data: texts, by purpose.
        seconds: of each step of the calibration.
        made_by: versions, command and machine.
    """

    kind: Literal["crossfill-pair"] = "crossfill-pair"
    format: Literal[1] = 1
    mode: ReuseMode = ReuseMode.GUIDED
    map_top_p: Share = 0.95
    map_density: Share = 0.3
    sender: ModelIdentity
    receiver: ModelIdentity
    layers: tuple[LayerNumber, ...]
    first_layer: LayerNumber
    top_p: Share
    layer_top_p: dict[LayerNumber, Share] = Field(default_factory=dict)
    layer_density: dict[LayerNumber, Share] = Field(default_factory=dict)
    min_tokens: int = Field(ge=64)
    max_density: Share
    weights_digest: str = ""
    gate: tuple[Measured, ...] = ()
    data: tuple[DataSource, ...] = ()
    seconds: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    made_by: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.layers) != self.receiver.layers:
            raise ValueError(f"layers names {len(self.layers)}, {self.receiver.name} has {self.receiver.layers}")
        if self.sender.tokenizer != self.receiver.tokenizer:
            raise ValueError(f"{self.sender.name} and {self.receiver.name} have different tokenizers")
        check_layers(self.layers, self.guided, self.sender, self.layer_top_p, self.layer_density)
        return self

    @property
    def guided(self) -> range:
        """Receiver layers that are."""
        return range(self.first_layer, len(self.layers) - 1)

    @property
    def passed(self) -> bool:
        """Whether quality was measured and sufficed."""
        return bool(self.gate) and all(one.passed for one in self.gate)

    def is_of(self, sender: ModelIdentity, receiver: ModelIdentity) -> bool:
        """Whether it was made of these models, whatever they are served as."""
        return _same(self.sender, sender) and _same(self.receiver, receiver)


def _same(calibrated: ModelIdentity, served: ModelIdentity) -> bool:
    # Templates make prompts, which attention does not depend on. Layers and heads follow from the revision, but the
    # shapes of weights are checked by what the manifest says of them.
    return all(getattr(calibrated, part) == getattr(served, part) for part in _PARTS)


def write_artifact(folder: Path, manifest: Manifest, weights: Mapping[int, Matrix]) -> Manifest:
    """Write both files into `folder`, which is made; the manifest last, so that what is not whole is none.

    Args:
        folder: whose files of these names are replaced.
        manifest: the digest of the weights is filled in.
        weights: float32 [H_S, H_R] of each guided receiver layer; columns on the simplex.

    Returns:
        The manifest as it was written.

    Raises:
        PairArtifactError: the weights do not fit the manifest, or the folder cannot be written.
    """
    _check_weights(folder, manifest, weights)
    tensors = [array_tensor(str(layer), weights[layer]) for layer in sorted(weights)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        write(folder / WEIGHTS, tensors, lambda _done, _total: None)
        whole = manifest.model_copy(update={"weights_digest": _digest(folder / WEIGHTS)})
        partial = folder / f".{MANIFEST}"
        partial.write_text(json.dumps(whole.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / MANIFEST)
    except OSError as error:
        raise PairArtifactError(f"{folder}: cannot be written: {error.strerror}") from error
    return whole


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`.

    Raises:
        PairArtifactError: there is none, or it is not one; says where and what is wrong.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes(), strict=False)
    except OSError as error:
        raise PairArtifactError(
            f"{path}: cannot be read: {error.strerror}; `crossfill calibrate pair` makes it"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise PairArtifactError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from error


def read_weights(folder: Path, manifest: Manifest) -> dict[int, Matrix]:
    """The weights float32 [H_S, H_R] of each guided receiver layer.

    Raises:
        PairArtifactError: the file is missing, is not the manifest's, or does not fit it.
    """
    path = folder / WEIGHTS
    try:
        if _digest(path) != manifest.weights_digest:
            raise PairArtifactError(f"{path}: is not the file that {MANIFEST} was written with; calibrate again")
        tensors = read(path)
        weights = {int(tensor.name): _as_float32(tensor) for tensor in tensors}
        if len(weights) < len(tensors):
            raise ValueError("two tensors are of one layer")
    except OSError as error:
        raise PairArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise PairArtifactError(f"{path}: {error}") from error
    _check_weights(folder, manifest, weights)
    return weights


def _as_float32(tensor: Tensor) -> Matrix:
    import numpy as np

    return np.asarray(to_array(tensor), dtype=np.float32)


def _check_weights(folder: Path, manifest: Manifest, weights: Mapping[int, Matrix]) -> None:
    if sorted(weights) != list(manifest.guided):
        raise PairArtifactError(f"{folder}: weights of layers {sorted(weights)}, want {list(manifest.guided)}")
    shape = (manifest.sender.heads, manifest.receiver.heads)
    for layer, matrix in weights.items():
        if matrix.shape != shape:
            raise PairArtifactError(f"{folder}: weights of layer {layer} are {list(matrix.shape)}, want {list(shape)}")
        # Not a number is in no interval.
        on_simplex = bool((matrix >= 0).all()) and bool((abs(matrix.sum(axis=0) - 1) <= _SUM_TOLERANCE).all())
        if not on_simplex:
            raise PairArtifactError(f"{folder}: weights of layer {layer} are not at least 0 with columns that sum to 1")


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=_DIGEST_BYTES, person=b"crossfill-pair").hexdigest()
