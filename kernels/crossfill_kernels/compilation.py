"""Compile Triton kernels for GPUs that this machine does not have, and say what they would use of one.

ptxas and cuobjdump come with Triton's wheel, so a change that makes a kernel spill shows without a GPU.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90)
"""A100 and A800; H100, H200 and H800."""

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one program may use."""

_TENSOR_CORE = re.compile(r"\b(HMMA|HGMMA|IMMA|IGMMA)\.\S+")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class CompileCase:
    """A kernel in one configuration that its launcher chooses.

    Attributes:
        name: the configuration in words, such as "d 128, bfloat16"; unique within an op.
        kernel: the `triton.jit` function, imported without the interpreter.
        signature: Triton type of every argument that is neither a constant nor an "i32", such as "*bf16"; pointers are
            taken to be aligned to 16 bytes, as torch's allocations are.
        constants: value of every constant argument.
        num_warps, num_stages: as launched.
        capabilities: the GPU generations that it is chosen for.
        aligned: names of integer arguments that are multiples of 16; strides `…_row` and `…_head` are without saying.
        tensor_cores: whether the kernel is worth nothing without them.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    capabilities: tuple[int, ...] = CAPABILITIES
    aligned: frozenset[str] = field(default_factory=frozenset)
    tensor_cores: bool = False


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel uses.

    Attributes:
        registers: registers of a thread (at most 255).
        spill_stores, spill_loads: instructions that move registers to and from local memory; one is too many.
        shared_bytes: shared memory of a program.
        tensor_cores: the tensor-core instructions found, such as "HMMA.16816.F32.BF16", each once.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    tensor_cores: tuple[str, ...]


def compile_case(case: CompileCase, capability: int) -> Resources:
    """Compile one configuration for one GPU generation; it takes seconds the first time, then Triton's cache has it.

    Args:
        case: the configuration.
        capability: 80 or 90.
    """
    kernel = triton.compile(
        _source(case),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    listing = _disassemble(kernel.asm["cubin"])
    registers = re.search(r"\bREG:(\d+)", listing)
    assert registers is not None, "cuobjdump -res-usage names the registers"
    opcodes = [match.group(1) for match in _INSTRUCTION.finditer(listing)]
    return Resources(
        registers=int(registers.group(1)),
        spill_stores=sum(opcode.startswith("STL") for opcode in opcodes),
        spill_loads=sum(opcode.startswith("LDL") for opcode in opcodes),
        shared_bytes=kernel.metadata.shared,
        tensor_cores=tuple(sorted({opcode for opcode in opcodes if _TENSOR_CORE.match(opcode)})),
    )


def _source(case: CompileCase) -> ASTSource:
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for position, name in enumerate(case.kernel.arg_names):
        signature[name] = "constexpr" if name in case.constants else case.signature.get(name, "i32")
        if signature[name].startswith("*") or name in case.aligned or name.endswith(("_row", "_head")):
            attributes[position,] = [["tt.divisibility", 16]]
    return ASTSource(case.kernel, signature, dict(case.constants), attributes)


def _disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        usage, code = (
            subprocess.run([tool, option, str(path)], check=True, capture_output=True, text=True).stdout  # noqa: S603
            for option in ("-res-usage", "-sass")
        )
    return usage + code


def ops_with_triton() -> tuple[str, ...]:
    """Names of the ops that have Triton kernels, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/triton.py")))


def cases_of(op: str) -> tuple[CompileCase, ...]:
    """The configurations that an op's launcher chooses."""
    module = importlib.import_module(f"crossfill_kernels.{op}.triton")
    cases: tuple[CompileCase, ...] = module.compile_cases()
    return cases
