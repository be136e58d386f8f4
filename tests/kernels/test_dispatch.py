import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.native import library

CPU = torch.zeros(1)


def counted(op, implementation):
    return dispatch.calls().get((op, implementation), 0)


def test_the_cpu_is_served_natively_and_counted():
    before = counted("an_op", "native")
    assert dispatch.choose("an_op", CPU) == "native"
    assert counted("an_op", "native") == before + 1


def test_without_the_library_the_reference_serves():
    before = counted("an_op", "reference")
    with library.replaced(None):
        assert dispatch.choose("an_op", CPU) == "reference"
    assert counted("an_op", "reference") == before + 1


def test_what_an_op_does_not_have_cannot_be_forced():
    with dispatch.forced("torch"):
        assert dispatch.choose("an_op", CPU) == "native"
        assert dispatch.choose("an_op", CPU, others=("torch",)) == "torch"
    assert dispatch.choose("an_op", CPU, others=("torch",)) == "native"


def test_the_library_never_gets_tensors_of_another_device():
    with dispatch.forced("native"):
        assert dispatch.choose("an_op", CPU.to("meta")) == "reference"


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ArgumentError, match="reference, native, torch, triton"), dispatch.forced("bogus"):
        pass


def test_some_ops_are_forced_and_others_are_not():
    with dispatch.forced("reference"):
        dispatch.force("triton", {"an_op"})
        assert dispatch.choose("an_op", CPU) == "triton"
        assert dispatch.choose("another", CPU) == "native"
    assert dispatch.choose("an_op", CPU) == "native"
