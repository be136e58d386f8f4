"""Block masses of both models over the texts of a calibration: all that weights and layers of guided prefill need.

The masses of a text of T tokens are T² / 8192 numbers a head a layer, so all of them are kept: 30 layers of 9 heads
over ten texts of 2,048 tokens take 6 MB in float32. Maps are thousands of times as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from crossfill_kernels.rows import BLOCK
from engines.calibration.observation import observe
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from engines.calibration.observation import Observation
    from engines.reuse.study.network import Network

    Masses = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Samples:
    """Of row blocks of all texts, side by side: the share of a row block's attention that a column block gets.

    Attributes:
        sender: [S, H_S, M] of M pairs of a row block and a column block that it sees.
        receiver: [R, H_R, M].
        row_blocks: how many row blocks there are; of one head all shares of each sum to 1.
    """

    sender: Masses
    receiver: Masses
    row_blocks: int


def gather(
    sender: Network, receiver: Network, texts: Sequence[Sequence[int]], *, progress: Progress = silent
) -> Samples:
    """Let both models read every text.

    Args:
        texts: token ids, the same for both models; whole row blocks of them count.

    Raises:
        ValueError: no text has a row block.
    """
    if not any(len(text) >= BLOCK for text in texts):
        raise ValueError(f"no text has {BLOCK} tokens")
    theirs, own, blocks = [], [], 0
    progress("reading", 0, len(texts))
    for done, text in enumerate(texts, 1):
        whole = len(text) // BLOCK
        if whole:
            theirs.append(_shares(observe(sender, text), whole))
            own.append(_shares(observe(receiver, text), whole))
            blocks += whole
        progress("reading", done, len(texts))
    return Samples(np.concatenate(theirs, axis=2), np.concatenate(own, axis=2), blocks)


def _shares(observation: Observation, blocks: int) -> Masses:
    """[layers, H, M] of the first `blocks` row blocks."""
    rows, columns = torch.tril_indices(blocks, blocks)
    kept = [mass[:, rows, columns] / BLOCK for mass in observation.masses()]
    return np.asarray(torch.stack(kept).numpy())
