"""The C++ library of the CPU kernels: which variant is loaded, and how tensors are handed to it.

It is built once, at set-up (`python -m crossfill_kernels.native.build`). Where it is missing, torch serves.
"""

import ctypes
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from crossfill_kernels.blocks import BlockIndex, MapStorage, PackedMap
from crossfill_kernels.errors import ArgumentError, NativeLibraryError
from crossfill_kernels.rows import Rows

PACKAGE = Path(__file__).resolve().parent.parent
BUILD_FOLDER = PACKAGE / "native" / "_build"
STAMP = "stamp"
_RUNNABLE = {"AVX512": ("avx512", "avx2", "generic"), "AVX2": ("avx2", "generic")}

_log = logging.getLogger(__name__)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


class Tensor3(ctypes.Structure):
    """A tensor [a, b, d] with unit stride in d."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride0", ctypes.c_int64),
        ("stride1", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class Cache(ctypes.Structure):
    """Keys and values of one request."""

    _fields_ = (
        ("keys", Tensor3),
        ("values", Tensor3),
        ("slots", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
    )


class RowsView(ctypes.Structure):
    """`Rows`."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("block_count", ctypes.c_int64),
    )


class IndexView(ctypes.Structure):
    """`BlockIndex`."""

    _fields_ = (("offsets", ctypes.c_void_p), ("columns", ctypes.c_void_p))


class PackedView(ctypes.Structure):
    """`PackedMap`."""

    _fields_ = (
        ("offsets", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("heads", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


def tensor3(tensor: torch.Tensor) -> Tensor3:
    """View of a tensor [a, b, d] whose last stride is 1; keep the tensor alive during the call."""
    return Tensor3(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), _DTYPES[tensor.dtype])


def cache(keys: torch.Tensor, values: torch.Tensor, slots: "slice | torch.Tensor") -> Cache:
    """View of a request's keys and values in the cache; `slots` as in `paged_attention`."""
    if isinstance(slots, slice):
        where, first, length = None, slots.start, slots.stop - slots.start
    else:
        where, first, length = slots.data_ptr(), 0, slots.numel()
    return Cache(tensor3(keys), tensor3(values), where, first, length, keys.shape[1], keys.shape[2])


def rows_view(rows: Rows) -> RowsView:
    """View of the rows of a call."""
    return RowsView(
        rows.positions.data_ptr(), rows.blocks.data_ptr(), rows.starts.data_ptr(), rows.count, rows.block_count
    )


def index_view(index: BlockIndex) -> IndexView:
    """View of an index of kept blocks."""
    return IndexView(index.offsets.data_ptr(), index.columns.data_ptr())


def packed_view(packed: PackedMap) -> PackedView:
    """View of a packed map."""
    storage: MapStorage = packed.storage
    scales = storage.scales.data_ptr() if storage.scales is not None else None
    return PackedView(
        packed.offsets.data_ptr(),
        packed.columns.data_ptr(),
        packed.slots.data_ptr(),
        storage.blocks.data_ptr(),
        scales,
        packed.heads,
        _DTYPES[storage.blocks.dtype],
    )


@dataclass(frozen=True)
class Status:
    """Whether the library serves.

    Attributes:
        variant: the loaded variant (`avx512`, `avx2` or `generic`), None if none is.
        reason: why none is; empty otherwise.
    """

    variant: str | None
    reason: str


class _Loader:
    """Opens the library once, whichever thread asks first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.library: ctypes.CDLL | None = None
        self.status: Status | None = None

    def open(self) -> None:
        with self._lock:
            if self.status is not None:
                return
            try:
                variant, self.library = _open()
                self.status = Status(variant, "")
                _log.info("CPU kernels: %s", variant)
            except NativeLibraryError as error:
                self.status = Status(None, str(error))
                _log.warning("torch serves in place of the CPU kernels, more slowly: %s", error)


_loader = _Loader()


def runnable_variants() -> tuple[str, ...]:
    """Variants of the library that this processor runs, the fastest first."""
    return _RUNNABLE.get(torch.backends.cpu.get_cpu_capability(), ("generic",))


def load() -> ctypes.CDLL | None:
    """The library, opened at the first call; None (warned about once) where there is none to open."""
    if _loader.status is None:
        _loader.open()
    return _loader.library


def status() -> Status:
    """Which variant serves, or why none does."""
    load()
    assert _loader.status is not None
    return _loader.status


@contextmanager
def replaced(variant: str | None, folder: Path = BUILD_FOLDER) -> Iterator[None]:
    """Another variant of the library serves, or none; for tests. Not for several threads."""
    status()
    before = _loader.library, _loader.status
    if variant is None:
        _loader.library, _loader.status = None, Status(None, "replaced")
    else:
        _loader.library = ctypes.CDLL(str(folder / f"libcrossfill_{variant}.so"))
        _loader.status = Status(variant, "")
    try:
        yield
    finally:
        _loader.library, _loader.status = before


class Function:
    """A function of the library, looked up at its first call.

    Args:
        name: its symbol.
        argtypes: its ctypes argument types.
    """

    def __init__(self, name: str, *argtypes: type) -> None:
        self._name, self._argtypes = name, argtypes
        self._library: ctypes.CDLL | None = None
        self._symbol: Callable[..., object] | None = None

    def __call__(self, *arguments: object) -> None:
        """Call it; the interpreter's lock is released meanwhile.

        Raises:
            NativeLibraryError: there is no library.
        """
        library = load()
        if library is None:
            raise NativeLibraryError(status().reason)
        if self._symbol is None or self._library is not library:
            symbol = getattr(library, self._name)
            symbol.argtypes, symbol.restype = self._argtypes, None
            self._symbol, self._library = symbol, library
        self._symbol(*arguments)


def threads() -> int:
    """Threads that a call may use: torch's, so that OMP_NUM_THREADS and torch.set_num_threads both count."""
    return torch.get_num_threads()


def check_cpu(**tensors: torch.Tensor) -> None:
    """Raise an ArgumentError unless all these tensors are on the CPU, with unit stride in their last dimension."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ArgumentError(name, f"want a CPU tensor, got one on {tensor.device}")
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ArgumentError(name, f"want unit stride in the last dimension, got strides {tensor.stride()}")


def sources() -> list[Path]:
    """Every file that the library is built from."""
    return sorted([*PACKAGE.glob("*/*.cpp"), *PACKAGE.glob("*/*.h"), PACKAGE / "native" / "CMakeLists.txt"])


def digest() -> str:
    """Digest of the sources; a library built from others is not loaded."""
    summary = hashlib.blake2b(digest_size=16)
    for path in sources():
        content = path.read_bytes()
        summary.update(f"{path.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return summary.hexdigest()


def stamp_of(folder: Path, *, sanitize: bool = False) -> str:
    """What a complete build of these sources leaves beside its libraries: digest, kind, and the size of each."""
    libraries = sorted(folder.glob("libcrossfill_*.so"))
    sizes = [f"{path.name} {path.stat().st_size}" for path in libraries]
    return "\n".join([digest(), "sanitized" if sanitize else "plain", *sizes]) + "\n"


def fault_of(folder: Path, *, sanitize: bool = False) -> str | None:
    """Why the build in `folder` is not to be used; None if it is."""
    try:
        stamp = (folder / STAMP).read_bytes()
    except OSError:
        return "the C++ library was not built"
    if stamp != stamp_of(folder, sanitize=sanitize).encode():
        return "the C++ library was built from other sources, or not to the end"
    return None


def _open() -> tuple[str, ctypes.CDLL]:
    remedy = "build it: make setup, or python -m crossfill_kernels.native.build"
    if fault := fault_of(BUILD_FOLDER):
        raise NativeLibraryError(f"{fault}; {remedy}")
    variant = runnable_variants()[0]
    path = BUILD_FOLDER / f"libcrossfill_{variant}.so"
    try:
        return variant, ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(
            f"{path.name} cannot be loaded ({error}); remove {BUILD_FOLDER} and {remedy}"
        ) from error
