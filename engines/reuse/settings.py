"""What a worker is told about reuse: who it is, what it publishes, and from whom it takes. Free of torch and SGLang."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cache_store.config import StoreSettings
from cache_store.pool.geometry import SlotType
from cache_store.sizes import SizeBytes
from engines.reuse.refusal import Refusal

VARIABLE = "CROSSFILL_REUSE"
"""Of a worker's environment: `ReuseSettings` as JSON. Not on the command line, as a store's URL may have a password."""

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class Weights(StrEnum):
    """How masses of the sender's heads make those of the receiver's; `fitted` by a calibration, layer by layer."""

    UNIFORM = "uniform"
    IDENTITY = "identity"
    FITTED = "fitted"


class ReuseMode(StrEnum):
    """What of the sender's a pair reuses.

    `guided`: masses, which say where the receiver's own attention looks. `map`: attention itself, mixed and applied to
    the receiver's values (MapFlow, Algorithm 2). `hybrid`: maps in layers where they are sparse enough to save time.
    """

    GUIDED = "guided"
    MAP = "map"
    HYBRID = "hybrid"


class ModelIdentity(BaseModel):
    """A model as namespaces of the store know it.

    Attributes:
        name: as it is served.
        revision, tokenizer, template: digests of weights, tokenizer and chat template.
        layers, heads: of its attention.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    revision: str = Field(min_length=1)
    tokenizer: str = Field(min_length=1)
    template: str
    layers: Count
    heads: Count


class PairTuning(BaseModel):
    """How much of a prefill is guided (guided prefill, beyond MapFlow: masses say where the receiver looks).

    Attributes:
        first_layer: receiver layers before it are computed as always, and so is the last one.
        weights: of the heads' mixture.
        top_p: share of attention mass that the kept blocks reach.
        min_tokens: a prefix of which fewer tokens could be guided is not worth it.
        max_density: more kept blocks than this share of the causal ones save too little.
        mode: what is reused; without a usable map a layer is guided.
        map_top_p: share of attention mass that the blocks of a map reach, of each sender head.
        map_density: of `hybrid`: where some head of a map keeps more than this share of the causal blocks, a layer is
            guided.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_layer: int = Field(default=3, ge=0)
    weights: Weights = Weights.UNIFORM
    top_p: Share = 0.95
    min_tokens: int = Field(default=512, ge=64)
    max_density: Share = 0.7
    mode: ReuseMode = ReuseMode.GUIDED
    map_top_p: Share = 0.95
    map_density: Share = 0.3

    @property
    def uses_maps(self) -> bool:
        """Whether maps are wanted of the sender."""
        return self.mode is not ReuseMode.GUIDED

    @property
    def most_map_density(self) -> float:
        """Share of the causal blocks above which a layer is not computed by its map."""
        return self.map_density if self.mode is ReuseMode.HYBRID else 1.0


def check_layers(
    layers: Sequence[int],
    guided: Collection[int],
    sender: ModelIdentity,
    layer_top_p: Collection[int],
    layer_density: Collection[int],
) -> None:
    """Make sure that what is said of a receiver's layers fits.

    Args:
        layers: sender layer of each.
        guided: those that are.
        sender: model that guides them.
        layer_top_p, layer_density: that have a share or a density of their own.

    Raises:
        ValueError: says what does not.
    """
    if any(layer >= sender.layers for layer in layers):
        raise ValueError(f"layers names one that {sender.name} lacks; it has {sender.layers}")
    if not guided:
        raise ValueError("no layer is left between first_layer and the last one")
    if not set(layer_top_p) <= set(guided):
        raise ValueError("layer_top_p names a layer that is not guided")
    if layer_density and set(layer_density) != set(guided):
        raise ValueError("layer_density names other layers than are guided")


class PairSettings(PairTuning):
    """How a receiver uses one sender's masses.

    Attributes:
        sender: the model that publishes.
        layers: of each receiver layer the sender layer whose masses guide it.
        layer_top_p: of guided receiver layers that do not keep `top_p`.
        layer_density: share of the causal blocks that guided layers usually keep; of all of them or of none.
        shards: parts of its heads that the sender's ranks publish, each its own (tensor parallelism).
        artifact: folder of the calibration that fitted the weights.
        refused: why the pair is not used although it is configured.
    """

    sender: ModelIdentity
    layers: tuple[Annotated[int, Field(ge=0)], ...]
    layer_top_p: Mapping[Annotated[int, Field(ge=0)], Share] = Field(default_factory=dict)
    layer_density: Mapping[Annotated[int, Field(ge=0)], Share] = Field(default_factory=dict)
    shards: Count = 1
    artifact: str | None = None
    refused: Refusal | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_layers(self.layers, self.guided, self.sender, self.layer_top_p, self.layer_density)
        if self.sender.heads % self.shards:
            raise ValueError(f"{self.sender.heads} heads of {self.sender.name} are not {self.shards} equal shards")
        if (self.weights is Weights.FITTED) != (self.artifact is not None):
            raise ValueError("fitted weights come from the artifact of a calibration, and no others do")
        return self

    @property
    def guided(self) -> Mapping[int, int]:
        """Sender layer of each receiver layer that is guided, in their order."""
        return {layer: self.layers[layer] for layer in range(self.first_layer, len(self.layers) - 1)}

    def top_p_of(self, layer: int) -> float:
        """Share of attention mass that a guided receiver layer keeps."""
        return self.layer_top_p.get(layer, self.top_p)

    def guided_by(self, sender_layer: int) -> list[int]:
        """Receiver layers that one sender layer guides."""
        return [layer for layer, of in self.guided.items() if of == sender_layer]


class ShadowSettings(BaseModel):
    """How many guided prefills are compared with dense ones in production, and when a pair has drifted.

    Attributes:
        share: of guided requests that are drawn; 0 turns it off.
        max_divergence: most that the mean KL divergence of the next token may be, in nats.
        window: comparisons that a verdict on a pair needs; the last ones count.
        max_tokens: longer prompts are not compared.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    # Twice what a calibration's gate lets pass, and below what random blocks as dense come to (docs/reuse.md).
    max_divergence: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    window: int = Field(default=32, ge=8, le=10_000)
    max_tokens: int = Field(default=8192, ge=64)


class MapSettings(BaseModel):
    """The block pool of a machine, in which maps lie, and how they are packed.

    Attributes:
        pool: its name; workers that share it have the same.
        pool_bytes: of its slots; taken from shared memory when the first worker opens it.
        dtype: of a probability in it; bytes have a scale for each row of a block.
        renormalise: make what is kept of a row sum to 1.
        capture_bytes: of queries and keys that wait to be packed; more are dropped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: str = Field(default="crossfill", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    pool_bytes: SizeBytes = Field(default=2**30, ge=2**20)
    dtype: SlotType = SlotType.UINT8
    renormalise: bool = True
    capture_bytes: SizeBytes = Field(default=512 * 2**20, ge=2**20)


class ReuseSettings(BaseModel):
    """All that one worker knows of reuse.

    Attributes:
        model: which it serves.
        publish: layers whose masses others want; none for a model that nobody takes from.
        pairs: from whom it takes, the preferred first.
        store: where state is kept.
        wait_s: most that a request waits for the store when its turn has come.
        wait_share: of the time that it may save, the share that it waits at most.
        capture_bytes: of masses that wait to be published; more are dropped.
        shadow: of comparisons in production.
        publish_maps: layers whose maps others want, with the share of mass that their blocks reach.
        maps: where they lie.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelIdentity
    publish: tuple[Annotated[int, Field(ge=0)], ...] = ()
    pairs: tuple[PairSettings, ...] = ()
    store: StoreSettings = Field(default_factory=StoreSettings)
    wait_s: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    wait_share: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    capture_bytes: int = Field(default=256 * 2**20, ge=2**20)
    shadow: ShadowSettings = ShadowSettings()
    publish_maps: Mapping[Annotated[int, Field(ge=0)], Share] = Field(default_factory=dict)
    maps: MapSettings = MapSettings()

    @property
    def takes_maps(self) -> bool:
        """Whether maps of others may compute layers of this worker."""
        return any(pair.uses_maps and pair.refused is None for pair in self.pairs)

    @property
    def has_maps(self) -> bool:
        """Whether this worker packs maps or takes them."""
        return bool(self.publish_maps) or self.takes_maps

    @property
    def is_shadowed(self) -> bool:
        """Whether any prefill of this worker is compared."""
        return self.shadow.share > 0 and any(pair.refused is None for pair in self.pairs)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if any(layer >= self.model.layers for layer in self.publish):
            raise ValueError(f"publish names a layer that {self.model.name} lacks; it has {self.model.layers}")
        if not set(self.publish_maps) <= set(self.publish):
            raise ValueError("publish_maps names a layer whose masses are not published")
        senders = [pair.sender.name for pair in self.pairs]
        if (twice := next((name for name in senders if senders.count(name) > 1), None)) is not None:
            raise ValueError(f"{self.model.name} takes from {twice} by two pairs; keep one")
        for pair in self.pairs:
            if len(pair.layers) != self.model.layers:
                raise ValueError(
                    f"the pair with {pair.sender.name} names {len(pair.layers)} layers, "
                    f"{self.model.name} has {self.model.layers}"
                )
            if pair.weights is Weights.IDENTITY and pair.sender.heads != self.model.heads:
                raise ValueError(
                    f"identity weights need as many heads in {pair.sender.name} ({pair.sender.heads}) "
                    f"as in {self.model.name} ({self.model.heads})"
                )
        return self


def align_suffix(receiver_layers: int, sender_layers: int) -> tuple[int, ...]:
    """Sender layer of each receiver layer, counted from the last (MapFlow, § Layer alignment); 0 where none is."""
    return tuple(max(0, layer + sender_layers - receiver_layers) for layer in range(receiver_layers))
