"""Errors of the `crossfill` program.

CrossfillError
├── StartError    something that `crossfill up` needs is missing or taken; the operator must act
└── BenchError    a measurement could not be made
"""


class CrossfillError(Exception):
    """Base of the errors that end `crossfill` with one line on stderr and status 1."""


class StartError(CrossfillError):
    """The stack cannot be started."""


class BenchError(CrossfillError):
    """A measurement could not be made."""
