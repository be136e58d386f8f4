"""Where the rows of a segment's cache lie: in a tensor of their own, or scattered over a paged cache."""

from dataclasses import dataclass

import torch

from crossfill_kernels.arguments import FLOATS
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.slots import Slots, is_run, length_of


@dataclass(frozen=True)
class SegmentRows:
    """The T rows of a segment, made by `segment_pair`.

    Attributes:
        data: [rows, H_kv, d] with unit stride in d.
        slots: the row of each token; distinct where the rows are written.
    """

    data: torch.Tensor
    slots: Slots

    @property
    def length(self) -> int:
        """Number of tokens T."""
        return length_of(self.slots)

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return self.data.shape[1]

    @property
    def dim(self) -> int:
        """Head dimension d."""
        return self.data.shape[2]

    @property
    def width(self) -> int:
        """Numbers a token D, its heads concatenated."""
        return self.heads * self.dim

    def read(self) -> torch.Tensor:
        """The rows [T, H_kv, d]; a view where they are consecutive."""
        return self.data[self.slots] if isinstance(self.slots, slice) else self.data.index_select(0, self.slots)

    def matrix(self) -> torch.Tensor | None:
        """The rows as a matrix [T, D] that shares their memory; None where there is no such view."""
        merged = self.merged()
        return merged.data[self.slots, 0] if merged and isinstance(self.slots, slice) else None

    def merged(self) -> "SegmentRows | None":
        """The same rows as one head of D numbers; None where the heads do not lie side by side."""
        if self.heads > 1 and self.data.stride(1) != self.dim:
            return None
        return SegmentRows(self.data.flatten(1).unsqueeze(1), self.slots)

    def write(self, values: torch.Tensor) -> None:
        """Store the rows: [T, H_kv, d] or [T, D], rounded to the dtype of the cache."""
        rows = values.view(self.length, self.heads, self.dim)
        if isinstance(self.slots, slice):
            self.data[self.slots].copy_(rows)
        else:
            self.data.index_copy_(0, self.slots, rows.to(self.data.dtype))


def segment_pair(
    source: torch.Tensor,
    out: torch.Tensor,
    source_slots: Slots | None,
    out_slots: Slots | None,
    *,
    source_name: str = "source",
) -> tuple[SegmentRows, SegmentRows]:
    """Check what an op reads and what it writes, and bring both into one form.

    Args:
        source: [T, D] or [T, H_kv, d] (D = H_kv·d), or a cache [rows, H_kv, d] with `source_slots`.
        out: likewise, with `out_slots`; of the dtype of `source`, or float32.
        source_slots, out_slots: cache rows of the segment's tokens; None: all rows in their order.
        source_name: what the op calls `source`.

    Raises:
        ArgumentError: a shape, dtype, device or layout does not fit, the segments differ in length, or a slot lies
            outside its cache (looked at on a CPU only).
    """
    _check_layout(source_name, source)
    _check_layout("out", out)
    if out.device != source.device:
        raise ArgumentError("out", f"want the device of {source_name} {source.device}, got {out.device}")
    if out.dtype not in (source.dtype, torch.float32):
        raise ArgumentError("out", f"want {source.dtype} or float32, got {out.dtype}")
    heads = source.shape[1:] if source.dim() == 3 else out.shape[1:] if out.dim() == 3 else (1, source.shape[1])
    read = SegmentRows(_split(source_name, source, heads), _slots("source_slots", source, source_slots))
    write = SegmentRows(_split("out", out, heads), _slots("out_slots", out, out_slots))
    if write.length != read.length:
        argument = "out" if out_slots is None else "out_slots"
        raise ArgumentError(argument, f"{write.length} rows for a segment of {read.length} tokens")
    return read, write


def merged_pair(source: SegmentRows, out: SegmentRows) -> tuple[SegmentRows, SegmentRows]:
    """Both as one head of D numbers, if both can be; heads matter to a rotation only."""
    one, other = source.merged(), out.merged()
    return (source, out) if one is None or other is None else (one, other)


def segment_rows(name: str, tensor: torch.Tensor, slots: Slots | None) -> SegmentRows:
    """Check what an op only reads: [T, D] or [T, H_kv, d], or a cache [rows, H_kv, d] with `slots`.

    Raises:
        ArgumentError: as `segment_pair`.
    """
    _check_layout(name, tensor)
    heads = tensor.shape[1:] if tensor.dim() == 3 else (1, tensor.shape[1])
    return SegmentRows(_split(name, tensor, heads), _slots("slots", tensor, slots))


def _check_layout(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() not in (2, 3) or tensor.dtype not in FLOATS:
        raise ArgumentError(
            name, f"want float32 or bfloat16 [T, D] or [rows, H_kv, d], got {tensor.dtype} {list(tensor.shape)}"
        )
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ArgumentError(name, f"want unit stride in the last dimension, got strides {tensor.stride()}")


def _split(name: str, tensor: torch.Tensor, heads: "torch.Size | tuple[int, int]") -> torch.Tensor:
    count, dim = heads
    if tensor.dim() == 2 and tensor.shape[1] == count * dim:
        return tensor.view(tensor.shape[0], count, dim)
    if tensor.dim() == 3 and tensor.shape[1:] == (count, dim):
        return tensor
    raise ArgumentError(name, f"want rows of {count} × {dim}, got {list(tensor.shape)}")


def _slots(name: str, tensor: torch.Tensor, slots: Slots | None) -> Slots:
    rows = tensor.shape[0]
    if slots is None:
        return slice(0, rows)
    if isinstance(slots, slice):
        if not is_run(slots):
            raise ArgumentError(name, f"want a slice from a first to a last row, got {slots}")
        first, last = slots.start, slots.stop - 1
    else:
        if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device != tensor.device:
            got = f"{slots.dtype} {list(slots.shape)} on {slots.device}"
            raise ArgumentError(name, f"want int64 [T] on {tensor.device}, got {got}")
        slots = slots.contiguous()
        first, last = 0, -1
        if slots.numel() and not slots.is_cuda:
            first, last = (int(end) for end in slots.aminmax())
    if first < 0 or last >= rows:
        raise ArgumentError(name, f"rows {first} … {last} of a cache of {rows}")
    return slots
