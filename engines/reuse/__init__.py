"""Reuse between models within a worker: what it publishes, what it takes from others, and why not (MapFlow)."""
