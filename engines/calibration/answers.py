"""Greedy answers to questions about a prefix, and how much they have of the right ones."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.rows import BLOCK
from engines.models.needle import MAX_NEW_TOKENS
from engines.reuse.study.masks import Mask
from engines.reuse.study.passages import inquiries
from engines.reuse.study.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.needle import Needle
    from engines.reuse.study.pair import Pair


def rouge_l(said: str, wanted: str) -> float:
    """F-measure of the longest common subsequence of words (Lin 2004, "ROUGE", § 3, both halves of equal weight)."""
    own, right = _words(said), _words(wanted)
    lengths = [0] * (len(right) + 1)
    for word in own:
        before = 0
        for place, other in enumerate(right, 1):
            kept = lengths[place]
            lengths[place] = before + 1 if word == other else max(kept, lengths[place - 1])
            before = kept
    return _f_measure(lengths[-1], len(own), len(right))


def f1(said: str, wanted: str) -> float:
    """F-measure of the words in common, in any order (Rajpurkar et al. 2016, "SQuAD", § 6.1)."""
    own, right = _words(said), _words(wanted)
    return _f_measure((Counter(own) & Counter(right)).total(), len(own), len(right))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _f_measure(common: int, own: int, right: int) -> float:
    return 2 * common / (own + right) if common else 0.0


def ask(pair: Pair, asked: Sequence[Needle], prose: Sequence[int]) -> dict[Mask, list[str]]:
    """Greedy answers to all questions about one text, after a dense and after a guided prefix.

    Args:
        pair: as it is to be used.
        asked: facts that are put into the text.
        prose: of the text, token ids.
    """
    tokenizer = pair.receiver.tokenizer
    prompts = inquiries(tokenizer, asked, prose)
    # What all begin with; of each a token is left.
    shortest = min(map(len, prompts)) - 1
    places = enumerate(zip(*(one[:shortest] for one in prompts), strict=True))
    common = next((place for place, tokens in places if len(set(tokens)) > 1), shortest) // BLOCK * BLOCK
    prefix = prompts[0][:common]
    # No mask here is random.
    runs = Runs(pair, prefix, common, torch.Generator())
    return {
        mask: [
            tokenizer.decode(ids, skip_special_tokens=True)
            for ids in pair.receiver.answers(prefix, attend, [one[common:] for one in prompts], MAX_NEW_TOKENS)
        ]
        for mask, attend in runs.under((Mask.DENSE, Mask.GUIDED))
    }
