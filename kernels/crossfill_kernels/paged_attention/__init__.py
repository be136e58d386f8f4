"""Causal attention of a request's newest rows over its paged KV cache.

`paged_attention` serves both phases of a request: in an extend the rows are the new tokens of a prompt (or of a chunk
of it), in a decode there is one. Only those rows are computed, whatever stands before them in the cache.

`paged_attention_reference` documents the maths; every other implementation is compared with it.
"""

from crossfill_kernels.paged_attention.cpu import paged_attention
from crossfill_kernels.paged_attention.reference import paged_attention_reference
from crossfill_kernels.paged_attention.slots import Slots, as_slots

__all__ = ["Slots", "as_slots", "paged_attention", "paged_attention_reference"]
