"""Attention state and KV anchors by token prefix, shared by all workers."""
