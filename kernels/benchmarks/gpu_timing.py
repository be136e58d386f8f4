"""Times of the Triton kernels and of what they have to beat, on masks of real shape; part of gpu_check.py."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from gpu_correctness import Inputs, Shape, difference, make_inputs
from masks import striped_index, striped_mass

from crossfill_kernels import dispatch
from crossfill_kernels.block_mass import block_mass, block_mass_reference, block_mass_sampled
from crossfill_kernels.blocks import BlockIndex, MapStorage
from crossfill_kernels.guided_attention import guided_attention, guided_attention_reference
from crossfill_kernels.map_attention import map_attention, map_attention_reference
from crossfill_kernels.mix_mass import mix_mass, quantise_mass
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import BLOCK, rows_at
from crossfill_kernels.select_blocks import select_blocks

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One measurement, or why there is none.

    Attributes:
        op: an op of ours, or a peer.
        case: its variant in words.
        heads, length: of the shape.
        density: share of the causal blocks that are kept; None where all are.
        ms: median milliseconds; None if nothing was timed.
        note: why nothing was timed.
    """

    op: str
    case: str
    heads: str
    length: int
    density: float | None
    ms: float | None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What is timed.

    Attributes:
        shapes: the longest contexts last, since time may run out.
        densities: of kept blocks.
        peers: whether FlexAttention and flashinfer stand beside ours.
    """

    shapes: tuple[Shape, ...]
    densities: tuple[float, ...]
    peers: bool


def plan(*, small: bool) -> Plan:
    """4K … 32K tokens on a GPU, something tiny in the interpreter."""
    if small:
        return Plan((Shape(2, 1, 16, 256, 256, torch.float32, paged=False),), (0.8,), peers=False)
    return Plan(
        tuple(
            Shape(heads, 8, 128, length, length, torch.bfloat16, paged=False)
            for length in (4096, 16384, 32768)
            for heads in (16, 32)
        ),
        (0.05, 0.10, 0.20, 0.30),
        peers=True,
    )


def time_shape(shape: Shape, given: Plan, device: torch.device, seconds: Callable[[Run], float]) -> Iterator[Timing]:
    """Time everything at a shape; what is wrong is not timed, and says so.

    Args:
        shape: all rows of a context.
        given: the densities, and whether peers are timed.
        device: where.
        seconds: measures one function, in seconds.
    """
    inputs = make_inputs(shape, device)
    empty = Timing("", "", f"{shape.heads}/{shape.kv_heads}", shape.context, None, None)

    def timed(op: str, case: str, run: Run, density: float | None = None, worst: float = 0.0) -> Timing:
        row = replace(empty, op=op, case=case, density=density)
        if not worst <= 1:
            return replace(row, note=f"wrong: {worst:.3g} times the tolerance")
        return replace(row, ms=seconds(run) * 1e3)

    yield timed("torch SDPA", "dense, causal", dense(inputs))
    if given.peers:
        yield from _flashinfer(inputs, empty, timed)
    with dispatch.forced("triton"):
        yield from _dense_ops(inputs, timed)
        for density in given.densities:
            index = striped_index(shape.heads, shape.context // BLOCK, density).to(device)
            run, worst = _guided(inputs, index)
            yield timed("guided_attention", "", run, density, worst)
            if given.peers:
                yield _flex(inputs, index, density, empty, timed)
        for density in given.densities[:2]:
            index = striped_index(shape.heads, shape.context // BLOCK, density).to(device)
            yield from _map_ops(shape, inputs, index, density, timed)


Timed = Callable[..., Timing]


def dense(inputs: Inputs) -> Run:
    """Dense causal attention by torch of the same tensors: flash attention where there is a GPU."""
    first = inputs.slots.start if isinstance(inputs.slots, slice) else 0
    length = inputs.rows.count
    keys, values = (cache[first : first + length] for cache in (inputs.keys, inputs.values))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (inputs.query, keys, values))
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, scale=inputs.scale
    )


def _newest(inputs: Inputs) -> Inputs:
    """The last row block's rows alone: a reference over all rows would not fit."""
    count = (inputs.rows.last % BLOCK) + 1
    length = inputs.rows.count
    rows = rows_at(range(length - count, length)).to(inputs.query.device)
    return replace(inputs, query=inputs.query[-count:], rows=rows)


def _tolerance(inputs: Inputs) -> float:
    return 1e-2 if inputs.query.dtype == torch.bfloat16 else 1e-5


def _dense_ops(inputs: Inputs, timed: Timed) -> Iterator[Timing]:
    out = torch.full_like(inputs.query, float("nan"))

    def attend() -> object:
        return block_mass(*inputs.attention, scale=inputs.scale, out=out)

    def sample() -> object:
        return block_mass_sampled(*inputs.scoring, scale=inputs.scale)

    mass, newest = block_mass(*inputs.attention, scale=inputs.scale, out=out), _newest(inputs)
    want, want_mass, _ = block_mass_reference(*newest.attention, scale=inputs.scale)
    worst = max(
        difference(out[-want.shape[0] :], want, _tolerance(inputs)),
        difference(mass.mass[:, -1:], want_mass.mass, 1e-5),
    )
    yield timed("block_mass", "with attention", attend, worst=worst)
    yield timed("block_mass_sampled", "every 8th row", sample)
    heads, blocks = inputs.query.shape[1], inputs.rows.block_count
    striped = striped_mass(heads, blocks)
    real = replace(mass, mass=striped.mass.to(out.device))
    yield timed("select_blocks", "top-p 0.87", lambda: select_blocks(real, top_p=0.87))
    yield timed("quantise_mass", "keep 0.98", lambda: quantise_mass(real))
    quantised, weights = quantise_mass(real), torch.rand(heads, heads, device=out.device) / heads
    yield timed("mix_mass", f"to {heads} heads", lambda: mix_mass(quantised, weights, blocks))


def _guided(inputs: Inputs, index: BlockIndex) -> tuple[Run, float]:
    out = torch.full_like(inputs.query, float("nan"))

    def run() -> None:
        guided_attention(*inputs.attention, index, scale=inputs.scale, out=out)

    run()
    newest = _newest(inputs)
    last = _last_lists(index)
    want = guided_attention_reference(*newest.attention, last, scale=inputs.scale)
    return run, difference(out[-want.shape[0] :], want, _tolerance(inputs))


def _last_lists(index: BlockIndex) -> BlockIndex:
    """The lists of the last row block alone."""
    count = index.blocks.numel()
    offsets = index.offsets.cpu()
    parts = [index.columns[offsets[h * count + count - 1] : offsets[(h + 1) * count]] for h in range(index.heads)]
    starts = torch.tensor([0, *(part.numel() for part in parts)]).cumsum(0).int()
    return BlockIndex(index.heads, index.blocks[-1:].contiguous(), starts.to(index.blocks.device), torch.cat(parts))


def _map_ops(shape: Shape, inputs: Inputs, index: BlockIndex, density: float, timed: Timed) -> Iterator[Timing]:
    device, kept = inputs.query.device, int(index.offsets[-1])
    storage = MapStorage(
        torch.zeros(kept, BLOCK, BLOCK, dtype=torch.uint8, device=device), torch.zeros(kept, BLOCK, device=device)
    )
    slot_ids = torch.arange(kept, dtype=torch.int32, device=device)

    def pack() -> object:
        return pack_map(*inputs.scoring, index, scale=inputs.scale, storage=storage, slot_ids=slot_ids)

    packed = pack_map(*inputs.scoring, index, scale=inputs.scale, storage=storage, slot_ids=slot_ids)
    yield timed("pack_map", "uint8", pack, density)
    everyone = torch.rand(shape.heads, shape.heads, device=device) / shape.heads
    # Two sender heads in every receiver head.
    few = everyone * (torch.rand(shape.heads, shape.heads, device=device).argsort(dim=0) < 2)
    newest = _newest(inputs)
    for form, weights in (("paper", everyone), ("mix", everyone), ("values_first", everyone), ("sparse", few)):
        out = torch.full_like(inputs.query, float("nan"))
        given = (packed, weights, inputs.values, inputs.slots, inputs.rows)

        def attend(form: str = form, given: tuple[object, ...] = given, out: torch.Tensor = out) -> None:
            map_attention(*given, out=out, form=form)  # type: ignore[arg-type]

        attend()
        want = map_attention_reference(packed, weights, inputs.values, inputs.slots, newest.rows)
        worst = difference(out[-want.shape[0] :], want, _tolerance(inputs))
        yield timed("map_attention", f"uint8, {form}", attend, density, worst)


def _flashinfer(inputs: Inputs, empty: Timing, timed: Timed) -> Iterator[Timing]:
    if importlib.util.find_spec("flashinfer") is None:
        yield replace(empty, op="flashinfer", case="dense, causal", note="not installed")
        return
    import flashinfer

    first = inputs.slots.start if isinstance(inputs.slots, slice) else 0
    keys, values = (cache[first : first + inputs.rows.count] for cache in (inputs.keys, inputs.values))

    def run() -> object:
        return flashinfer.single_prefill_with_kv_cache(inputs.query, keys, values, causal=True, sm_scale=inputs.scale)

    yield _peer("flashinfer", "dense, causal", run, None, empty, timed)


def _flex(inputs: Inputs, index: BlockIndex, density: float, empty: Timing, timed: Timed) -> Timing:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    blocks = inputs.rows.block_count
    mask = index.mask(blocks)
    diagonal = torch.eye(blocks, dtype=torch.bool, device=mask.device)

    def lists(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = kept.int().argsort(dim=-1, descending=True, stable=True)
        return kept.sum(dim=-1).int()[None], order.int()[None]

    kept = BlockMask.from_kv_blocks(
        *lists(mask & diagonal), *lists(mask & ~diagonal), BLOCK_SIZE=BLOCK, mask_mod=_causal
    )
    first = inputs.slots.start if isinstance(inputs.slots, slice) else 0
    keys, values = (cache[first : first + inputs.rows.count] for cache in (inputs.keys, inputs.values))
    q, k, v = (tensor.transpose(0, 1)[None].contiguous() for tensor in (inputs.query, keys, values))
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> object:
        return compiled(q, k, v, block_mask=kept, enable_gqa=True, scale=inputs.scale)

    return _peer("FlexAttention", "compiled", run, density, empty, timed)


def _causal(_b: torch.Tensor, _h: torch.Tensor, q_index: torch.Tensor, kv_index: torch.Tensor) -> torch.Tensor:
    """At module level: a new function for every mask would be compiled anew."""
    return q_index >= kv_index


def _peer(op: str, case: str, run: Run, density: float | None, empty: Timing, timed: Timed) -> Timing:
    """A peer's time; one that fails must not end the check of our own kernels."""
    try:
        return timed(op, case, run, density)
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is its result
        return replace(empty, op=op, case=case, density=density, note=f"{type(error).__name__}: {str(error)[:80]}")
