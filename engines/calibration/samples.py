"""Block masses of both models over the texts of a calibration: all that weights and layers of guided prefill need.

The masses of a text of T tokens are T² / 8192 numbers a head a layer, so all of them are kept: 30 layers of 9 heads
over ten texts of 2,048 tokens take 6 MB in float32. Maps are thousands of times as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from crossfill_kernels.rows import BLOCK
from engines.calibration.journal import Journal
from engines.calibration.observation import observe_masses
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

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
    sender: Network,
    receiver: Network,
    texts: Sequence[Sequence[int]],
    *,
    journal: Journal | None = None,
    progress: Progress = silent,
) -> Samples:
    """Let both models read every text.

    Args:
        texts: token ids, the same for both models; whole row blocks of them count.
        journal: of what was read.
        progress: told of every text.

    Raises:
        ValueError: no text has a row block.
    """
    if not any(len(text) >= BLOCK for text in texts):
        raise ValueError(f"no text has {BLOCK} tokens")
    journal, parts = journal or Journal(), []
    progress("reading", 0, len(texts))
    for done, text in enumerate(texts, 1):
        if len(text) >= BLOCK:
            find = partial(_read, sender, receiver, text)
            parts.append(journal.get("observe", list(text), find))
        progress("reading", done, len(texts))
    theirs, own = (
        np.concatenate([part[of] for part in parts], axis=2, dtype=np.float32) for of in ("sender", "receiver")
    )
    return Samples(theirs, own, sum(len(text) // BLOCK for text in texts))


def _read(sender: Network, receiver: Network, text: Sequence[int]) -> dict[str, Masses]:
    return {"sender": _shares(sender, text), "receiver": _shares(receiver, text)}


def _shares(network: Network, text: Sequence[int]) -> Masses:
    """[layers, H, M] of the whole row blocks."""
    blocks = len(text) // BLOCK
    rows, columns = torch.tril_indices(blocks, blocks)
    return np.asarray((observe_masses(network, text[: blocks * BLOCK])[:, :, rows, columns] / BLOCK).numpy())
