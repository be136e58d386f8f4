"""Builds the C++ library of the CPU kernels with CMake, at set-up: `python -m crossfill_kernels.native.build`."""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from crossfill_kernels.errors import NativeLibraryError
from crossfill_kernels.native.library import BUILD_FOLDER, PACKAGE, STAMP, fault_of, stamp_of

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("CXXFLAGS", "CFLAGS", "CPPFLAGS", "LDFLAGS")


def build(folder: Path = BUILD_FOLDER, *, sanitize: bool = False) -> bool:
    """Compile every variant of the library into `folder`, unless it holds these sources' already.

    Several processes may build at once; one does the work. Flags of the environment (CXXFLAGS and its like) are left
    out: `-ffast-math` in a library changes the arithmetic of the whole process, `-march=native` the portable variant.

    Args:
        folder: where the build goes.
        sanitize: with the address and undefined-behaviour sanitizers, for tests.

    Returns:
        Whether there was anything to do.

    Raises:
        NativeLibraryError: there is no CMake or no C++ compiler, the compiler fails, or the folder cannot be written;
            the message says how.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if fault_of(folder, sanitize=sanitize) is None:
                (folder / STAMP).touch()  # newer than the sources, for `make`
                return False
            _compile(folder, sanitize=sanitize)
    except OSError as error:
        if fault_of(folder, sanitize=sanitize) is not None:
            raise NativeLibraryError(f"{folder} cannot be written: {error}") from error
        return False
    return True


def _compile(folder: Path, *, sanitize: bool) -> None:
    (folder / STAMP).unlink(missing_ok=True)
    _check_compiler()
    cmake = _program("cmake")
    flag = "ON" if sanitize else "OFF"
    source = ["-S", str(PACKAGE / "native"), "-B", str(folder), "-G", "Ninja", f"-DCROSSFILL_SANITIZE={flag}"]
    # Fresh, since the checkout may have been moved or the compiler changed.
    _run([cmake, "--fresh", *source])
    _run([cmake, "--build", str(folder)])
    (folder / STAMP).write_text(stamp_of(folder, sanitize=sanitize), encoding="utf-8")


def _program(name: str) -> str:
    """A program beside this interpreter (where pip puts CMake), or on the PATH."""
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which(name, path=folders)
    if found is None:
        raise NativeLibraryError(f"no {name} on this machine (pip install {name})")
    return found


def _check_compiler() -> None:
    """Raise a NativeLibraryError unless CMake will find a C++ compiler: what CXX names, or a usual one."""
    named = os.environ.get("CXX", "").split()[:1]
    if not any(shutil.which(name) for name in named or _COMPILERS):
        raise NativeLibraryError(f"no C++ compiler on this machine ({', '.join(named or _COMPILERS)}); install g++")


def _run(command: list[str]) -> None:
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    kept = {name: value for name, value in os.environ.items() if name not in _FLAGS}
    done = subprocess.run(  # noqa: S603  # our own command line
        command, capture_output=True, text=True, check=False, env={**kept, "PATH": beside}
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise NativeLibraryError(f"{' '.join(command[:3])} … failed:\n{tail}")


def main() -> int:
    """Build, and say how it went; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", action="store_true", help="with the address sanitizer, for tests")
    parser.add_argument("--folder", type=Path, default=BUILD_FOLDER)
    options = parser.parse_args()
    try:
        if build(options.folder, sanitize=options.sanitize):
            variants = sorted(path.stem.removeprefix("libcrossfill_") for path in options.folder.glob("*.so"))
            print(f"CPU kernels: built for {', '.join(variants)}")  # noqa: T201  # a command's output
    except NativeLibraryError as error:
        print(f"CPU kernels: {error}\nGoing on without them; torch serves, more slowly.", file=sys.stderr)  # noqa: T201  # a command's output
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
