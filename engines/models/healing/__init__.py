"""Heal a model whose layers were dropped: distil the whole model into it with low-rank adapters, on one CPU.

In the order of a run: `plan` says how much of what, `corpus`, `sampling` and `recall` make the text, `dataset` packs
it, `student` is the model that is trained, `loss` what it is trained on, `training` the loop, `export` the adapter file
that ships.
"""
