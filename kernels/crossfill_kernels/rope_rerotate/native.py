"""Re-rotation on a CPU: one pass over the keys, from any cache rows to any others."""

import ctypes

from crossfill_kernels.native import library
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import SegmentRows


class _Places(ctypes.Structure):
    _fields_ = (("data", library.Tensor3), ("slots", ctypes.c_void_p), ("first", ctypes.c_int64))


class _Turn(ctypes.Structure):
    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("half", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    )


_rope_rerotate = library.Function(
    "crossfill_rope_rerotate",
    ctypes.POINTER(_Places),
    ctypes.POINTER(_Places),
    ctypes.POINTER(_Turn),
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
)


def rotate_native(source: SegmentRows, out: SegmentRows, rotation: Rotation) -> None:
    """See `rotate_keys`; arguments were checked."""
    library.check_cpu(keys=source.data, out=out.data)
    stride = rotation.half if rotation.cos.shape[0] > 1 else 0
    turn = _Turn(
        rotation.cos.data_ptr(), rotation.sin.data_ptr(), stride, rotation.half, int(rotation.layout == "gptj")
    )
    _rope_rerotate(_places(source), _places(out), turn, source.length, source.heads, source.dim, library.threads())


def _places(rows: SegmentRows) -> _Places:
    if isinstance(rows.slots, slice):
        return _Places(library.tensor3(rows.data), None, rows.slots.start)
    return _Places(library.tensor3(rows.data), rows.slots.data_ptr(), 0)
