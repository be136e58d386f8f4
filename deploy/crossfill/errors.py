"""Errors of the `crossfill` program.

CrossfillError
├── StartError        something that `crossfill up` needs is missing or taken; the operator must act
├── KeysError         the keys file cannot be changed as asked
├── ServingError      a running router could not be asked
├── BenchError        a measurement could not be made
└── CalibrationError  the data of a calibration cannot be used, or something it needs is not installed
"""


class CrossfillError(Exception):
    """Base of the errors that end `crossfill` with one line on stderr and status 1."""


class StartError(CrossfillError):
    """The stack cannot be started."""


class KeysError(CrossfillError):
    """The keys file cannot be changed as asked."""


class ServingError(CrossfillError):
    """A running router could not be asked."""


class BenchError(CrossfillError):
    """A measurement could not be made."""


class CalibrationError(CrossfillError):
    """A scorer cannot be fitted; the message names file and line where there is one."""
