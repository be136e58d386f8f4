"""Packages that only some commands need."""

from importlib.util import find_spec

from crossfill.errors import CalibrationError

_DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def require_packages(*packages: str) -> None:
    """Raise CalibrationError, with the remedy, if one of these is not installed."""
    for package in packages:
        if find_spec(package) is None:
            distribution = _DISTRIBUTIONS.get(package, package)
            raise CalibrationError(f"{distribution} is not installed; pip install 'crossfill[calibrate]'")
