"""The whole model's final hidden states, computed once for every row of text and kept in a file.

A row is used several times: by every size of student, and again in each epoch. Its states take 1,152 bytes a token; the
logits follow from them by one product with the head.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from engines.models.healing import network

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engines.models.healing.dataset import Rows
    from engines.models.loading import LoadedModel


def fingerprint(loaded: LoadedModel, *parts: bytes) -> str:
    """Sixteen hex digits for a model in its dtype, by the weights of its last layer, together with `parts`."""
    weight = loaded.model.model.layers[-1].mlp.down_proj.weight.detach()
    digest = hashlib.sha256(str(weight.dtype).encode() + weight.float().numpy().tobytes())
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


class TeacherStates:
    """States of the rows of one kind of text under `folder`; several processes may fill it at once.

    A row is marked as there only after it was written. Another text, teacher or dtype has other files.
    """

    def __init__(self, teacher: LoadedModel, kind: str, rows: Rows, folder: Path) -> None:
        self._teacher, self._rows = teacher, rows
        folder.mkdir(parents=True, exist_ok=True)
        count, length = rows.ids.shape
        shape = (count, length, teacher.model.config.hidden_size)
        name = f"{kind}-{fingerprint(teacher, rows.ids.tobytes())}"
        self._states = _file(folder / f"{name}.states", shape, "<i2")
        self._filled = _file(folder / f"{name}.filled", (count,), "u1")

    def __getitem__(self, rows: Sequence[int]) -> torch.Tensor:
        """Hidden states after the last norm, bfloat16 [rows · tokens, dim]."""
        missing = [row for row in rows if not self._filled[row]]
        if missing:
            ids = torch.from_numpy(self._rows.ids[missing].astype("int64"))
            with torch.no_grad():
                found = final_states(self._teacher, ids).view(torch.int16).numpy()
            self._states[missing] = found.reshape(len(missing), *self._states.shape[1:])
            self._states.flush()
            self._filled[missing] = 1
        states = torch.from_numpy(self._states[list(rows)]).view(torch.bfloat16)
        return states.reshape(-1, states.shape[-1])


def final_states(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states after the last norm of token `ids` [rows, tokens], in bfloat16: [rows · tokens, dim]."""
    with network.training_attention(loaded.model):
        output = loaded.model.model(ids, use_cache=False).last_hidden_state
    states: torch.Tensor = output.reshape(-1, output.shape[-1]).to(torch.bfloat16)
    return states


def _file(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap[tuple[int, ...], np.dtype[np.generic]]:
    # Both of two processes that begin at once make the file, sparse and of one size; neither truncates the other's.
    with path.open("ab") as target:
        target.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
