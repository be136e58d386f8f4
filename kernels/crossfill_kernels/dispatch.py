"""Which implementation of an op serves a call.

CUDA tensors go to Triton. CPU tensors go to the C++ library, and to the torch reference where that was not built; the
first time, a warning says why. Every call is counted, so that a test or a metric can tell which path ran.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.native import library

Implementation = Literal["reference", "native", "torch", "triton"]
"""`native` is the C++ library; `torch` is composed of torch's own operations, chosen where those are the fast way."""

_log = logging.getLogger(__name__)
_calls: Counter[tuple[str, str]] = Counter()
_forced: Implementation | None = None
_forced_ops: frozenset[str] | None = None


def choose(
    op: str,
    tensor: torch.Tensor,
    *,
    cpu: Implementation = "native",
    cuda: Implementation = "triton",
    others: tuple[Implementation, ...] = (),
) -> Implementation:
    """The implementation for tensors like this one, counted as one call of `op`.

    Args:
        op: the op's name.
        tensor: one of the call's tensors; its device decides.
        cpu, cuda: what the op prefers on each.
        others: what it has beside these and the reference.
    """
    has = {"reference", cpu, cuda, *others}
    preferred = cuda if tensor.is_cuda else cpu
    wanted = _forced if _forced_ops is None or op in _forced_ops else None
    chosen = wanted if wanted in has else preferred
    if chosen == "native" and (tensor.device.type != "cpu" or library.load() is None):
        chosen = "reference"
    _calls[op, chosen] += 1
    return chosen


@contextmanager
def forced(implementation: Implementation) -> Iterator[None]:
    """Every op that has it uses this implementation; for tests, comparisons and the search for a fault.

    One switch for all threads of the process.
    """
    global _forced, _forced_ops  # one switch a process is the point
    before = _forced, _forced_ops
    force(implementation)
    try:
        yield
    finally:
        _forced, _forced_ops = before


def force(implementation: Implementation, ops: Collection[str] | None = None) -> None:
    """As `forced`, for as long as the process lives; of these ops, or of all."""
    if implementation not in get_args(Implementation):
        raise ArgumentError("implementation", f"want one of {', '.join(get_args(Implementation))}")
    global _forced, _forced_ops
    _forced, _forced_ops = implementation, None if ops is None else frozenset(ops)


def calls() -> Mapping[tuple[str, str], int]:
    """Calls so far in this process, by (op, implementation)."""
    return dict(_calls)
