"""Slots of 64 × 64 probabilities, shared by the processes of a machine: MapFlow's paged pool for maps of any shape.

A sender allocates slots, writes them and publishes; receivers read where the slots lie, without a copy. Nobody waits
for a reader: a slot may be evicted while it is read, and `reading` finds that out before anything is used.
"""
