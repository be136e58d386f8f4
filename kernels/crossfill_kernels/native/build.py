"""Builds the C++ library of the CPU kernels with CMake, at set-up: `python -m crossfill_kernels.native.build`."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from crossfill_kernels.errors import NativeLibraryError
from crossfill_kernels.native.library import BUILD_FOLDER, PACKAGE, STAMP, digest


def build(folder: Path = BUILD_FOLDER, *, sanitize: bool = False) -> None:
    """Compile every variant of the library into `folder`; only what changed is compiled again.

    Args:
        folder: where the build goes.
        sanitize: with the address and undefined-behaviour sanitizers, for tests.

    Raises:
        NativeLibraryError: there is no CMake or no C++ compiler, or the compiler fails; the message says how.
    """
    stamp = folder / STAMP
    wanted = digest()
    if stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        stamp.touch()  # newer than the sources, for `make`
        return
    stamp.unlink(missing_ok=True)
    cmake = _program("cmake")
    flag = "ON" if sanitize else "OFF"
    _run([cmake, "-S", str(PACKAGE / "native"), "-B", str(folder), "-G", "Ninja", f"-DCROSSFILL_SANITIZE={flag}"])
    _run([cmake, "--build", str(folder)])
    stamp.write_text(wanted, encoding="ascii")


def _program(name: str) -> str:
    """A program beside this interpreter (where pip puts CMake), or on the PATH."""
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which(name, path=folders)
    if found is None:
        raise NativeLibraryError(f"no {name} on this machine (pip install {name})")
    return found


def _run(command: list[str]) -> None:
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(  # noqa: S603  # our own command line
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": beside}
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise NativeLibraryError(f"{' '.join(command[:3])} … failed (is a C++ compiler installed?):\n{tail}")


def main() -> int:
    """Build, and say how it went; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", action="store_true", help="with the address sanitizer, for tests")
    parser.add_argument("--folder", type=Path, default=BUILD_FOLDER)
    options = parser.parse_args()
    try:
        build(options.folder, sanitize=options.sanitize)
    except NativeLibraryError as error:
        print(f"{error}\nThe slow torch references will serve the CPU kernels.", file=sys.stderr)  # noqa: T201  # a command's output
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
