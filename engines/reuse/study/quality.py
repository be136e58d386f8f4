"""How near a receiver stays to its own dense prefill, by the mask of its prefix."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.rows import BLOCK
from engines.models.progress import Progress, silent
from engines.reuse.study.masks import Mask, density, like
from engines.reuse.study.network import dense
from engines.reuse.study.pair import Sparse
from engines.reuse.study.passages import passage, recollection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engines.models.needle import Needle
    from engines.reuse.study.network import Attend
    from engines.reuse.study.pair import Pair
    from engines.reuse.study.passages import Recollection

CONTINUATION = 128
# Needles of one conversation are of different kinds, of which there are eight; more would leave no prose in 1K tokens.
_NEEDLES_A_TEXT = 8


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
    groups = [needles[begin : begin + _NEEDLES_A_TEXT] for begin in range(0, len(needles), _NEEDLES_A_TEXT)]
    stage, total = f"{tokens} tokens, quality", len(Mask) * (texts + len(groups))
    done = 0
    progress(stage, 0, total)
    for number in range(texts + len(groups)):
        own_seed = seed + number
        talk = (
            recollection(pair.receiver.tokenizer, groups[number - texts], tokens, own_seed) if number >= texts else None
        )
        ids = talk.tokens if talk else passage(pair.receiver.tokenizer, tokens + CONTINUATION, own_seed)
        runs = _Runs(pair, ids, tokens, torch.Generator().manual_seed(own_seed))
        stored.append(runs.stored_bytes)
        for mask, attend in runs:
            hidden = pair.receiver.hidden(ids, attend)
            found[mask].densities.append(runs.density(mask))
            if talk:
                found[mask].recalled += _recalled(pair, hidden, talk)
            else:
                runs.compare(found[mask], mask, pair.receiver.log_probabilities(hidden[tokens:]))
            done += 1
            progress(stage, done, total)
    return QualityStudy(found, statistics.fmean(stored))


class _Runs:
    """One text under every mask, the dense one first."""

    def __init__(self, pair: Pair, ids: Sequence[int], tokens: int, generator: torch.Generator) -> None:
        left = pair.leave(ids)
        self.stored_bytes = left.bytes_a_token_a_layer
        self._guides = pair.guides(left, tokens // BLOCK)
        self._generator = generator
        self._dense = torch.empty(0)

    def __iter__(self) -> Iterator[tuple[Mask, Attend]]:
        for mask in Mask:
            yield mask, dense if mask is Mask.DENSE else self._sparse(mask)

    def density(self, mask: Mask) -> float:
        """Mean over the guided layers."""
        return 1.0 if mask is Mask.DENSE else statistics.fmean(density(one.index) for one in self._guides.values())

    def compare(self, quality: Quality, mask: Mask, found: torch.Tensor) -> None:
        """Note how far log-probabilities [n, V] are from those of the dense run."""
        if mask is Mask.DENSE:
            self._dense = found
        quality.divergence.append(float((self._dense.exp() * (self._dense - found)).sum(dim=-1).mean()))
        quality.agreement.append(float((self._dense.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()))

    def _sparse(self, mask: Mask) -> Attend:
        return Sparse({layer: like(one.index, mask, self._generator) for layer, one in self._guides.items()})


def _recalled(pair: Pair, hidden: torch.Tensor, talk: Recollection) -> list[bool]:
    found = []
    for value in talk.values:
        rows = torch.arange(value.start - 1, value.stop - 1)
        said = pair.receiver.log_probabilities(hidden[rows]).argmax(dim=-1).tolist()
        found.append(said == list(talk.tokens[value.start : value.stop]))
    return found
