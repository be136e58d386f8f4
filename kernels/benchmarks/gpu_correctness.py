"""Every Triton kernel against the float64 reference of its op, on whatever device; part of gpu_check.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.block_mass import (
    block_mass,
    block_mass_reference,
    block_mass_sampled,
    block_mass_sampled_reference,
)
from crossfill_kernels.blocks import BlockMass, MapStorage, PackedMap, index_of
from crossfill_kernels.guided_attention import guided_attention, guided_attention_reference
from crossfill_kernels.map_attention import FORMS, map_attention, map_attention_reference
from crossfill_kernels.mix_mass import mix_mass, mix_mass_reference, quantise_mass, quantise_mass_reference
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import BLOCK, Rows, rows_at
from crossfill_kernels.select_blocks import select_blocks, select_blocks_reference
from crossfill_kernels.slots import Slots

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """The newest `rows` positions of a context and every 7th before them, over a paged or a plain cache."""

    heads: int
    kv_heads: int
    d: int
    rows: int
    context: int
    dtype: torch.dtype
    paged: bool

    @property
    def name(self) -> str:
        """The shape in words."""
        kind = f"{str(self.dtype).removeprefix('torch.')}, {'paged' if self.paged else 'consecutive'}"
        return f"{self.heads}/{self.kv_heads} heads, d {self.d}, {self.rows} of {self.context}, {kind}"


@dataclass(frozen=True)
class Check:
    """How far a kernel's result is from the reference.

    Attributes:
        op, case: what was checked.
        worst: the greatest difference in units of what is allowed; not a number if the result holds one.
    """

    op: str
    case: str
    worst: float

    @property
    def passed(self) -> bool:
        """Whether every value is within the tolerance."""
        return self.worst <= 1


@dataclass(frozen=True)
class Inputs:
    """A request's tensors on a device."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: Slots
    rows: Rows
    scale: float

    @property
    def attention(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Slots, Rows]:
        """The arguments that attention ops begin with."""
        return self.query, self.keys, self.values, self.slots, self.rows

    @property
    def scoring(self) -> tuple[torch.Tensor, torch.Tensor, Slots, Rows]:
        """The arguments of ops without values."""
        return self.query, self.keys, self.slots, self.rows


def shapes(*, small: bool) -> tuple[Shape, ...]:
    """What is checked: a few shapes on a GPU, tiny ones in the interpreter."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    if small:
        return (Shape(4, 2, 16, 10, 70, float32, paged=True), Shape(2, 1, 16, 70, 70, bfloat16, paged=False))
    return tuple(
        Shape(*geometry, dtype, paged)
        for geometry in ((16, 8, 128, 300, 1000), (9, 3, 64, 513, 513), (32, 8, 128, 64, 2048), (4, 1, 80, 1, 777))
        for dtype in (float32, bfloat16)
        for paged in (False, True)
    )


def check_all(shape: Shape, device: torch.device) -> Iterator[Check]:
    """Run every op at a shape, as Triton kernels, and compare.

    Args:
        shape: what to run.
        device: where; kernels that are interpreted take the CPU.
    """
    inputs = make_inputs(shape, device)
    with dispatch.forced("triton"):
        for check in (_block_mass, _sampled, _guided, _lists, _maps):
            yield from check(shape, inputs)


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    """Random tensors of a shape, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    capacity = shape.context + 37
    early = range(0, shape.context - shape.rows, 7)
    positions = torch.tensor([*early, *range(shape.context - shape.rows, shape.context)])
    rows = rows_at(positions)
    query = torch.randn(rows.count, shape.heads, shape.d, generator=generator)
    keys, values = (torch.randn(capacity, shape.kv_heads, shape.d, generator=generator) for _ in range(2))
    scattered = torch.randperm(capacity, generator=generator)[: shape.context].to(device)
    slots: Slots = scattered if shape.paged else slice(5, 5 + shape.context)
    tensors = (tensor.to(device, shape.dtype) for tensor in (query, keys, values))
    return Inputs(*tensors, slots, rows.to(device), 1.3 * shape.d**-0.5)


def difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    """The greatest difference in units of `tolerance` · (1 + |want|)."""
    apart = (got.double() - want.double()).abs() / (tolerance * (1 + want.double().abs()))
    return float(apart.max()) if apart.numel() else 0.0


def _equal(got: torch.Tensor, want: torch.Tensor) -> float:
    return 0.0 if torch.equal(got, want) else float("inf")


def _block_mass(shape: Shape, inputs: Inputs) -> Iterator[Check]:
    out = torch.full_like(inputs.query, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"), device=out.device)
    mass = block_mass(*inputs.attention, scale=inputs.scale, out=out, lse=lse)
    want, want_mass, want_lse = block_mass_reference(*inputs.attention, scale=inputs.scale)
    yield Check("block_mass", f"{shape.name}: output", difference(out, want, TOLERANCE[shape.dtype]))
    yield Check("block_mass", f"{shape.name}: masses", difference(mass.mass, want_mass.mass, 1e-5))
    yield Check("block_mass", f"{shape.name}: log-sum-exp", difference(lse, want_lse, 1e-5))


def _sampled(shape: Shape, inputs: Inputs) -> Iterator[Check]:
    for stride in (1, 8):
        mass = block_mass_sampled(*inputs.scoring, scale=inputs.scale, stride=stride)
        want = block_mass_sampled_reference(*inputs.scoring, scale=inputs.scale, stride=stride)
        worst = max(difference(mass.mass, want.mass, 1e-5), _equal(mass.totals, want.totals))
        yield Check("block_mass_sampled", f"{shape.name}, every {stride}th row", worst)


def _guided(shape: Shape, inputs: Inputs) -> Iterator[Check]:
    for density in (0.0, 0.4, 1.0):
        index = index_of(_mask(shape, inputs.rows, density), inputs.rows.blocks)
        out = torch.full_like(inputs.query, float("nan"))
        guided_attention(*inputs.attention, index, scale=inputs.scale, out=out)
        want = guided_attention_reference(*inputs.attention, index, scale=inputs.scale)
        worst = difference(out, want, TOLERANCE[shape.dtype])
        yield Check("guided_attention", f"{shape.name}, density {density}", worst)


def _lists(shape: Shape, inputs: Inputs) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(1)
    columns = inputs.rows.last // BLOCK + 1
    mass = torch.rand(shape.heads, inputs.rows.block_count, columns, generator=generator) ** 6
    # Few values, so that many are equal.
    mass = (mass * 20).ceil().to(inputs.query.device)
    mass = mass.masked_fill(torch.arange(columns, device=mass.device) > inputs.rows.blocks[:, None], 0.0)
    given = BlockMass(mass, inputs.rows.blocks, mass.sum(dim=2).amax(dim=0))
    for top_p, cap in ((0.7, None), (0.95, 4), (1.0, None)):
        got, want = (choose(given, top_p=top_p, cap=cap) for choose in (select_blocks, select_blocks_reference))
        kept = got.columns[: want.columns.numel()]
        worst = max(_equal(got.offsets, want.offsets), _equal(kept, want.columns))
        yield Check("select_blocks", f"{shape.name}, top-p {top_p}, cap {cap}", worst)
    quantised, wanted = quantise_mass(given, keep=0.9), quantise_mass_reference(given, keep=0.9)
    pairs = ((quantised.offsets, wanted.offsets), (quantised.columns, wanted.columns), (quantised.codes, wanted.codes))
    yield Check("quantise_mass", shape.name, max(_equal(*pair) for pair in pairs))
    weights = torch.rand(shape.heads, 5, generator=generator).to(mass.device) / shape.heads
    mixed, mixture = mix_mass(wanted, weights, columns), mix_mass_reference(wanted, weights, columns)
    yield Check("mix_mass", shape.name, difference(mixed.mass, mixture.mass, 1e-5))


def _maps(shape: Shape, inputs: Inputs) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(2)
    receivers = 2 * shape.kv_heads
    weights = torch.rand(shape.heads, receivers, generator=generator)
    weights *= torch.rand(shape.heads, receivers, generator=generator) < 0.7
    weights = weights.to(inputs.query.device) / shape.heads
    for stored in (shape.dtype, torch.uint8):
        case = f"{shape.name}, in {str(stored).removeprefix('torch.')}"
        packed = _packed(shape, inputs, stored)
        with dispatch.forced("reference"):
            want = _packed(shape, inputs, torch.float32)
        values, expected = unpacked(packed), unpacked(want)
        # bfloat16 keeps 8 bits of a probability; a byte counts steps of a 255th of its row's greatest.
        step = expected.amax(dim=-1, keepdim=True) / 510 if stored == torch.uint8 else expected / 256
        beyond = ((values - expected).abs() - (step if stored != torch.float32 else 0)).clamp(min=0)
        yield Check("pack_map", case, difference(beyond, torch.zeros_like(beyond), TOLERANCE[shape.dtype]))
        given = (packed, weights, inputs.values, inputs.slots, inputs.rows)
        attended = map_attention_reference(*given)
        for form in FORMS:
            out = torch.full_like(attended, float("nan"))
            map_attention(*given, out=out, form=form)
            worst = difference(out, attended, TOLERANCE[shape.dtype])
            yield Check("map_attention", f"{case}, {form}", worst)


def _packed(shape: Shape, inputs: Inputs, stored: torch.dtype) -> PackedMap:
    index = index_of(_mask(shape, inputs.rows, 0.5), inputs.rows.blocks)
    kept, device = int(index.offsets[-1]), inputs.query.device
    scales = torch.full((kept, BLOCK), float("nan"), device=device) if stored == torch.uint8 else None
    storage = MapStorage(torch.zeros(kept, BLOCK, BLOCK, dtype=stored, device=device), scales)
    slot_ids = torch.randperm(kept, generator=torch.Generator().manual_seed(3)).int().to(device)
    return pack_map(*inputs.scoring, index, scale=inputs.scale, storage=storage, slot_ids=slot_ids)


def unpacked(packed: PackedMap) -> torch.Tensor:
    """Stored blocks as float64 [m, 64, 64], entry by entry."""
    tiles = packed.storage.blocks[packed.slots.long()].double()
    if packed.storage.scales is None:
        return tiles
    return tiles * packed.storage.scales[packed.slots.long()].double()[..., None]


def _mask(shape: Shape, rows: Rows, density: float) -> torch.Tensor:
    columns = rows.last // BLOCK + 1
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(shape.heads, rows.block_count, columns, generator=generator) < density
    return mask.to(rows.blocks.device)
