"""Errors of a worker.

EngineError
├── IncompatibleSglangError    the operator must install the pinned SGLang
├── WorkerConfigError          the operator must correct a worker's settings
├── UnsupportedModelError      the model needs something that our attention backend does not compute
├── MassRecordError            a record of masses does not hold what its name says; the layer is computed densely
├── MapRecordError             a record of maps does not hold what its name says; the layer is guided
├── CalibrationDataError       texts for a calibration cannot be read, or are too few
├── CalibrationFitError        weights of a pair's heads cannot be fitted to what was measured
├── PairArtifactError          the files of a calibrated pair cannot be used; the pair is not reused
└── ModelIdentityError         a model's folder does not tell which model it is, so nothing of it can be shared
"""


class EngineError(Exception):
    """Base of every error raised by `engines`. The text is one readable line."""


class IncompatibleSglangError(EngineError):
    """The installed SGLang is not the one Crossfill is written against."""


class WorkerConfigError(EngineError):
    """A setting of a worker is wrong."""


class UnsupportedModelError(EngineError):
    """The model has layers that the `crossfill` attention backend does not compute."""


class ModelIdentityError(EngineError):
    """A folder does not tell which model lies in it."""


class CalibrationDataError(EngineError):
    """Texts that a pair cannot be calibrated with."""


class CalibrationFitError(EngineError):
    """Moments that no weights can be fitted to."""


class PairArtifactError(EngineError):
    """The files of a calibrated pair are missing, damaged, or do not fit each other."""


class MassRecordError(EngineError):
    """The payload of a record is not the block masses that were asked for."""


class MapRecordError(EngineError):
    """The payload of a record is not the map that was asked for."""
