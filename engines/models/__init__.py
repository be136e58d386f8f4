"""Models that Crossfill makes on a machine: converted, pruned or drawn at random, and checked byte for byte."""

from engines.models.catalogue import CATALOGUE, ModelEntry, entry_of
from engines.models.prepare import DEFAULT_ROOT, prepare

__all__ = ["CATALOGUE", "DEFAULT_ROOT", "ModelEntry", "entry_of", "prepare"]
