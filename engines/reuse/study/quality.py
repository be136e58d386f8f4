"""How near a receiver stays to its own dense prefill, by the mask of its prefix."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.rows import BLOCK
from engines.models.progress import Progress, silent
from engines.reuse.study.masks import Mask
from engines.reuse.study.passages import passage, recollection
from engines.reuse.study.runs import Runs, distance, in_conversations, recalled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.needle import Needle
    from engines.reuse.study.pair import Pair

CONTINUATION = 128


@dataclass
class Quality:
    """Of one mask at one length.

    Attributes:
        densities: of guided layers' masks, one a text.
        divergence: mean KL from the dense run over a continuation's tokens, in nats, one a continuation.
        agreement: share of its tokens where both would say the same next, one a continuation.
        recalled: of each needle, whether every token of its value would have been said.
    """

    densities: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    recalled: list[bool] = field(default_factory=list)

    @property
    def recall(self) -> float:
        """Share of the needles."""
        return statistics.fmean(self.recalled)


@dataclass(frozen=True)
class QualityStudy:
    """By mask; and what the sender left, in bytes a token a layer."""

    masks: dict[Mask, Quality]
    stored_bytes: float


def study_quality(
    pair: Pair, tokens: int, *, texts: int, needles: Sequence[Needle], seed: int, progress: Progress = silent
) -> QualityStudy:
    """Continuations of `texts` passages, and `needles` in conversations, after prefixes of `tokens` tokens.

    Args:
        tokens: a multiple of 64; all of them are under the mask.
        texts: how many continuations.
        needles: to recall, of which eight share a conversation.
        seed: of texts and random masks.
    """
    if tokens % BLOCK:
        raise ValueError(f"want whole row blocks of {BLOCK} tokens, got {tokens} tokens")
    found = {mask: Quality() for mask in Mask}
    stored = []
    groups = in_conversations(needles)
    stage, total = f"{tokens} tokens, quality", len(Mask) * (texts + len(groups))
    done = 0
    progress(stage, 0, total)
    for number in range(texts + len(groups)):
        own_seed = seed + number
        talk = (
            recollection(pair.receiver.tokenizer, groups[number - texts], tokens, own_seed) if number >= texts else None
        )
        ids = talk.tokens if talk else passage(pair.receiver.tokenizer, tokens + CONTINUATION, own_seed)
        runs = Runs(pair, ids, tokens, torch.Generator().manual_seed(own_seed))
        stored.append(runs.left.bytes_a_token_a_layer)
        exact = torch.empty(0)
        for mask, attend in runs.under(Mask):
            hidden = pair.receiver.hidden(ids, attend)
            found[mask].densities.append(1.0 if mask is Mask.DENSE else runs.density)
            if talk:
                found[mask].recalled += recalled(pair.receiver, hidden, talk)
            else:
                logs = pair.receiver.log_probabilities(hidden[tokens:])
                exact = logs if mask is Mask.DENSE else exact
                divergence, agreement = distance(exact, logs)
                found[mask].divergence.append(divergence)
                found[mask].agreement.append(agreement)
            done += 1
            progress(stage, done, total)
    return QualityStudy(found, statistics.fmean(stored))
