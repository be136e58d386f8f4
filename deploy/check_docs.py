"""Checks that the documentation tells the truth and that no file outgrew its reader. Run: make check.

- docs/architecture.md names every module (of the kernels' ops, their folders), and every path that a page names exists;
- links between pages resolve; `make …` and `crossfill …` in the pages are real;
- docs/configuration.md has every key of the configuration, docs/metrics.md every series of the router;
- files have at most 400 lines, functions at most 60 (a Triton kernel is one function, however long).
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("router", "engines", "cache_store", "kernels/crossfill_kernels", "deploy/crossfill")
# Every op of the kernels has these, and the page says so once.
OF_AN_OP = ("reference.py", "native.py", "cpu.py", "triton.py")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def main() -> int:
    """Print each fault on a line; the exit status."""
    pages = [path for path in _tracked("*.md") if path.exists()]
    faults = [
        *_unnamed_modules(),
        *(fault for page in pages for fault in (*_dead_links(page), *_dead_paths(page), *_unknown_commands(page))),
        *_undocumented_keys(),
        *_undocumented_series(),
        *(fault for path in _tracked("*.py") if path.exists() for fault in _too_long(path)),
    ]
    for fault in faults:
        print(fault)  # noqa: T201  # a check's output
    return 1 if faults else 0


def _tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(  # noqa: S603  # fixed words
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],  # noqa: S607  # git from the PATH
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines()]


def _unnamed_modules() -> Iterator[str]:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = _documented_name(path)
            if path.name != "__init__.py" and f"`{name}`" not in page:
                yield f"docs/architecture.md does not name `{name}`"


def _documented_name(path: Path) -> str:
    """What a module goes by: itself, or the folder of the op of which it is one implementation."""
    is_op = path.name in OF_AN_OP and path.is_relative_to(ROOT / "kernels")
    return path.parent.relative_to(ROOT).as_posix() + "/" if is_op else path.relative_to(ROOT).as_posix()


def _dead_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("#") and not (page.parent / target.split("#")[0]).exists():
            yield f"{page.relative_to(ROOT)}: link to {target}, which does not exist"


def _dead_paths(page: Path) -> Iterator[str]:
    top = "|".join(("router", "engines", "cache_store", "kernels", "deploy", "tests", "docs"))
    for target in re.findall(rf"`((?:{top})/[\w./-]+)`", page.read_text(encoding="utf-8")):
        if not (ROOT / target).exists():
            yield f"{page.relative_to(ROOT)}: names {target}, which does not exist"


def _unknown_commands(page: Path) -> Iterator[str]:
    from crossfill.cli import app

    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for name in re.findall(r"`make ([\w-]+)|^ *make ([\w-]+)", text, re.MULTILINE):
        if (name[0] or name[1]) not in targets:
            yield f"{page.relative_to(ROOT)}: make {name[0] or name[1]} is no target"
    known = {
        command.name or (command.callback.__name__ if command.callback else "") for command in app.registered_commands
    }
    known |= {group.name or "" for group in app.registered_groups}
    for name in re.findall(r"(?:`|^ *|bin/)crossfill ([a-z][\w-]*)", text, re.MULTILINE):
        if name not in known:
            yield f"{page.relative_to(ROOT)}: crossfill {name} is no command"


def _undocumented_keys() -> Iterator[str]:
    from crossfill.config import StackConfig
    from router.config import RouterConfig
    from router.config.yaml_file import field_paths

    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    for key in sorted({path[-1] for model in (StackConfig, RouterConfig) for path in field_paths(model)}):
        if f"`{key}`" not in page:
            yield f"docs/configuration.md does not have the key `{key}`"


def _undocumented_series() -> Iterator[str]:
    from prometheus_client import CollectorRegistry

    from router.telemetry.metrics import RouterMetrics

    registry = CollectorRegistry()
    RouterMetrics(registry)
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        if f"`{name}`" not in page:
            yield f"docs/metrics.md does not have the series `{name}`"


def _too_long(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    name, lines = path.relative_to(ROOT), source.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            if length > MAX_FUNCTION_LINES and not kernel:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"


if __name__ == "__main__":
    sys.exit(main())
