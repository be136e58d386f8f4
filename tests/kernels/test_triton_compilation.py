import json
import subprocess
import sys
from pathlib import Path

import pytest

from crossfill_kernels.compilation import SHARED_LIMIT_BYTES, ops_with_triton

TOOL = Path(__file__).parents[2] / "kernels/benchmarks/triton_resources.py"
# Of its own, because this process imports the kernels interpreted.
CONTROL = """
import sys, triton
from crossfill_kernels.compilation import CompileCase, compile_case
sys.path.insert(0, sys.argv[1])
from spilling_kernel import outer_sum
for size in (16, 256):
    case = CompileCase("control", outer_sum, {"values": "*fp32", "out": "*fp32"}, {"SIZE": size}, num_warps=1)
    print(compile_case(case, 80).spill_stores)
"""


@pytest.fixture(scope="module")
def resources():
    run = subprocess.run([sys.executable, str(TOOL), "--json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def of_case(row):
    return f"{row['op']}, {row['case']}, sm_{row['capability']}"


def test_every_op_is_compiled_for_both_generations(resources):
    assert {(row["op"], row["capability"]) for row in resources} == {
        (op, c) for op in ops_with_triton() for c in (80, 90)
    }


def test_no_kernel_spills(resources):
    assert [of_case(row) for row in resources if row["spill_stores"] or row["spill_loads"]] == []


def test_shared_memory_fits(resources):
    assert [of_case(row) for row in resources if row["shared_bytes"] > SHARED_LIMIT_BYTES[row["capability"]]] == []


def test_matrix_products_run_on_tensor_cores(resources):
    wanting = [row for row in resources if row["wants_tensor_cores"]]
    assert wanting
    assert [of_case(row) for row in wanting if not row["tensor_cores"]] == []


def test_a_kernel_that_needs_too_many_registers_is_seen_to_spill(tmp_path):
    # Triton reads a kernel's source from its file.
    (tmp_path / "spilling_kernel.py").write_text(
        "import triton\nimport triton.language as tl\n\n\n"
        "@triton.jit\n"
        "def outer_sum(values, out, SIZE: tl.constexpr):\n"
        "    at = tl.arange(0, SIZE)\n"
        "    x = tl.load(values + at[:, None] * SIZE + at[None, :])\n"
        "    y = x * tl.sum(tl.sum(x, 1), 0)\n"
        "    tl.store(out + at[:, None] * SIZE + at[None, :], y)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", CONTROL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    few, many = map(int, run.stdout.split())
    assert few == 0
    assert many > 0
