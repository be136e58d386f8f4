"""Tensor operations, independent of SGLang. Each op ships a torch reference that documents its maths."""
