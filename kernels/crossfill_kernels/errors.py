"""Errors of the kernels.

KernelError
├── ArgumentError        the caller passed a tensor of the wrong shape, dtype or layout (also a ValueError)
├── SingularFitError     the rows seen so far do not determine a fit; add rows or regularise
└── NativeLibraryError   the C++ library cannot be built or loaded; whoever installs this can mend it
"""


class KernelError(Exception):
    """Base of every error raised by `crossfill_kernels`."""


class ArgumentError(KernelError, ValueError):
    """An argument does not fit; raised before any memory is touched.

    Attributes:
        argument: name of the parameter at fault.
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument


class SingularFitError(KernelError):
    """A least-squares fit is not determined by its rows; the message says what would determine it."""


class NativeLibraryError(KernelError):
    """The C++ library of the CPU kernels is missing, stale or broken; the message says the remedy."""
