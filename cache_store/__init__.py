"""Attention state and KV anchors by token prefix, shared by all workers.

Holds no code yet; the package fixes the import direction.
"""
