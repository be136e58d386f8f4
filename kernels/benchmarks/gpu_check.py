"""Checks every Triton kernel on this machine's GPU against its reference, then times them against their peers.

Run: gpu_check.py, which takes up to eight minutes; with --interpret, the same code at tiny sizes, in the interpreter.
Exit status: 0 all right, 1 something is wrong, 2 there is no GPU. All figures go to gpu_check.csv in $OUT or var/bench.
"""

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from gpu_corrections import check_corrections, segments, time_corrections
from gpu_correctness import Check, check_all, shapes
from gpu_timing import Run, Timing, plan, time_shape

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 450.0
"""No shape is begun later than this, compilation included."""


def main() -> int:
    """Check, then time what is right; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="run tiny sizes on the CPU, in Triton's interpreter")
    interpret = parser.parse_args().interpret
    if not interpret and not torch.cuda.is_available():
        said = (
            "There is no CUDA GPU here; with --interpret (make gpu-check ARGS=--interpret) tiny sizes run on the CPU."
        )
        print(said, file=sys.stderr)  # noqa: T201  # before any table
        return 2
    if interpret:
        from crossfill_kernels.interpretation import interpret_kernels

        interpret_kernels()
    device = torch.device("cpu" if interpret else "cuda")
    started = time.monotonic()
    # One console, wide enough for a log as well.
    console = Console(width=140)
    machine = (
        f"{'interpreter' if interpret else torch.cuda.get_device_name()}, torch {torch.__version__}, {_revision()}"
    )
    checks = [
        check
        for shape in track(shapes(small=interpret), description="checking", console=Console(stderr=True))
        for check in check_all(shape, device)
    ]
    checks += [check for segment in segments(small=interpret) for check in check_corrections(segment, device)]
    console.print(check_table(checks, machine))
    measure = _once_s if interpret else _median_s
    timings = []
    if all(check.passed for check in checks):
        timings = [row for segment in segments(small=interpret) for row in time_corrections(segment, device, measure)]
    given = plan(small=interpret)
    for shape in track(given.shapes, description="timing", console=Console(stderr=True)):
        if time.monotonic() - started > BUDGET_S:
            name = f"{shape.heads}/{shape.kv_heads}"
            timings.append(Timing("all", "", name, shape.context, None, None, f"left out: {BUDGET_S:.0f} s were over"))
            continue
        timings += time_shape(shape, given, device, measure)
    console.print(timing_table(timings, machine))
    console.print(f"Written to {write_csv(checks, timings, machine)}")
    return int(any(not check.passed for check in checks) or any(row.note.startswith("wrong") for row in timings))


def check_table(checks: Iterable[Check], machine: str) -> Table:
    """One row an op: how many cases, the worst of them, and every one that failed."""
    table = Table(title=f"Correctness: {machine}")
    for column in ("op", "cases", "worst ÷ tolerance", "wrong"):
        table.add_column(column)
    by_op: dict[str, list[Check]] = {}
    for check in checks:
        by_op.setdefault(check.op, []).append(check)
    for op, cases in by_op.items():
        wrong = [case for case in cases if not case.passed]
        # NaN is worse than any number.
        worst = max((case.worst for case in cases), key=lambda value: (value != value, value))  # noqa: PLR0124
        names = "\n".join(f"[red]{case.case}: {case.worst:.3g}" for case in wrong)
        table.add_row(op, str(len(cases)), f"{worst:.3g}", names or "none")
    return table


def timing_table(timings: Iterable[Timing], machine: str) -> Table:
    """One row a measurement, with its ratio to torch's dense attention of the same shape."""
    table = Table(title=f"Times: {machine}; medians")
    for column in ("op", "case", "heads", "tokens", "density", "ms", "SDPA ÷ this"):
        table.add_column(column)
    dense_ms: dict[tuple[str, int], float] = {}
    for row in timings:
        if row.op == "torch SDPA" and row.ms is not None:
            dense_ms[row.heads, row.length] = row.ms
        reference = dense_ms.get((row.heads, row.length))
        time_ms = f"{row.ms:.3f}" if row.ms is not None else f"[yellow]{row.note}"
        ratio = f"{reference / row.ms:.2f}×" if row.ms and reference else "–"
        density = "–" if row.density is None else f"{row.density:.2f}"
        table.add_row(row.op, row.case, row.heads, str(row.length), density, time_ms, ratio)
    return table


def write_csv(checks: Iterable[Check], timings: Iterable[Timing], machine: str) -> Path:
    """Write every figure with the machine and the revision; the file's path."""
    folder = Path(os.environ.get("OUT") or ROOT / "var/bench")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu_check.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("machine", "kind", "op", "case", "heads", "tokens", "density", "figure", "note"))
        for check in checks:
            figure = f"{check.worst:.6g}"
            writer.writerow((machine, "worst ÷ tolerance", check.op, check.case, "", "", "", figure, ""))
        for row in timings:
            figure = "" if row.ms is None else f"{row.ms:.6f}"
            density = "" if row.density is None else row.density
            writer.writerow((machine, "ms", row.op, row.case, row.heads, row.length, density, figure, row.note))
    return path


def _revision() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # fixed words
    return found.stdout.strip() or "unknown revision"


def _median_s(run: Run) -> float:
    import triton

    return float(triton.testing.do_bench(run, warmup=25, rep=100, return_mode="median")) / 1e3


def _once_s(run: Run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
