"""What the Triton kernels would use of an A800 and an H100, compiled without one. Run: triton_resources.py [OP …]."""

import argparse
import dataclasses
import json
import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

from crossfill_kernels.compilation import CompileCase, Resources, cases_of, compile_case, ops_with_triton


def main() -> None:
    """Print a table, or JSON: one row an op, configuration and GPU generation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops (default: all that have Triton kernels)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    unknown = set(arguments.ops) - set(ops_with_triton())
    if unknown:
        parser.error(f"no Triton kernels for {', '.join(sorted(unknown))}; there are {', '.join(ops_with_triton())}")
    jobs = [
        (op, case, capability)
        for op in arguments.ops or ops_with_triton()
        for case in cases_of(op)
        for capability in case.capabilities
    ]
    console = Console(stderr=True)
    rows = [
        (op, case, capability, compile_case(case, capability))
        for op, case, capability in track(jobs, description="compiling", console=console, transient=True)
    ]
    if arguments.json:
        json.dump([_record(*row) for row in rows], sys.stdout, indent=1)
        return
    table = Table(title="Triton kernels, compiled without a GPU")
    for column in ("op", "configuration", "GPU", "warps", "stages", "registers", "spills", "shared", "tensor cores"):
        table.add_column(column)
    for row in rows:
        table.add_row(*_cells(*row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _record(op: str, case: CompileCase, capability: int, used: Resources) -> dict[str, object]:
    return {
        "op": op,
        "case": case.name,
        "capability": capability,
        "wants_tensor_cores": case.tensor_cores,
        **dataclasses.asdict(used),
    }


def _cells(op: str, case: CompileCase, capability: int, used: Resources) -> tuple[str, ...]:
    spills = used.spill_stores + used.spill_loads
    cores = " ".join(sorted({name.split(".")[0] + " " + name.split(".")[-1] for name in used.tensor_cores}))
    return (
        op,
        case.name,
        f"sm_{capability}",
        str(case.num_warps),
        str(case.num_stages),
        str(used.registers),
        str(spills) if not spills else f"[red]{spills}",
        f"{used.shared_bytes / 1024:.1f} KiB",
        cores or "-",
    )


if __name__ == "__main__":
    main()
