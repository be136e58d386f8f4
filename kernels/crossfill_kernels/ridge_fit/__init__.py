"""Ridge maps from dense prefills, learned row by row (the fit behind `ridge_correct`).

Every dense prefill of a segment behind a known source cache gives rows (x, y): x a token's aligned source, y what its
target adds to it. What the fit needs of them are sums, so rows stream through, and sums of several workers merge. The
sums are float64: the result does not depend on the order of the rows or on how they were split.

Products and one eigenvalue problem, which torch gives to cuBLAS and cuSOLVER or to MKL and LAPACK: well-kept libraries
beat code of our own here, so torch serves on every device.
"""

from crossfill_kernels.ridge_correct.ridge_map import RidgeMap
from crossfill_kernels.ridge_fit.reference import ridge_fit_reference
from crossfill_kernels.ridge_fit.sums import RidgeSums

__all__ = ["RidgeMap", "RidgeSums", "ridge_fit_reference"]
