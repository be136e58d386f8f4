"""Judgements of several models side by side, as a table and as JSON; the first is the reference."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engines.models.judge import compare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from engines.models.interval import Ratio
    from engines.models.judge import Comparison, Judgement, JudgeSize
    from engines.models.needle import Recall
    from engines.models.perplexity import Perplexity


def table(judged: Sequence[Judgement]) -> Table:
    """A column for each model; figures of all but the first with their ratio to it and its 95 % interval."""
    from rich.table import Table

    columns = [_column(judged[0], None)] + [_column(one, compare(one, judged[0])) for one in judged[1:]]
    drawn = Table(box=None, padding=(0, 2, 0, 0))
    drawn.add_column("")
    for one in judged:
        drawn.add_column(one.name, overflow="fold")
    for label in columns[0]:
        drawn.add_row(label, *(column[label] for column in columns))
    return drawn


def as_json(judged: Sequence[Judgement], size: JudgeSize) -> dict[str, Any]:
    """Everything but the loss of each token: the size, the figures, the ratios to the first model, and all answers."""
    models = []
    for one in judged:
        ratios = None if one is judged[0] else asdict(compare(one, judged[0]))
        models.append(_figures(one) | {"ratios": ratios})
    return {"size": asdict(size), "models": models}


def _column(one: Judgement, ratios: Comparison | None) -> dict[str, str]:
    cells = {
        "parameters": f"{one.parameters / 1e6:.1f} M",
        "layers": str(one.layers),
        "perplexity, prose": f"{one.prose.value:.2f}" + _ratio(ratios.prose if ratios else None),
        "perplexity, chat answers": f"{one.chat.value:.2f}" + _ratio(ratios.chat if ratios else None),
    }
    if one.conversations:
        talk = f"{one.conversations.value:.2f}" + _ratio(ratios.conversations if ratios else None)
        cells["perplexity, conversations"] = talk
    if one.recall:
        reach = one.recall.interval
        share = f"{one.recall.right} of {one.recall.of}" + _ratio(ratios.recall if ratios else None)
        cells["needle recall"] = share if ratios else f"{share} ({reach.low:.2f}–{reach.high:.2f})"
        cells["by depth, in fifths"] = " ".join(f"{right}/{of}" for right, of in one.recall.by_depth())
    if one.answers:
        cells["easy questions"] = f"{one.right} of {len(one.answers)}" + _ratio(ratios.answers if ratios else None)
    return cells


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f" ×{ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"


def _figures(one: Judgement) -> dict[str, Any]:
    return {
        "name": one.name,
        "parameters": one.parameters,
        "layers": one.layers,
        "prose": _perplexity(one.prose),
        "chat": _perplexity(one.chat),
        "conversations": one.conversations and _perplexity(one.conversations),
        "recall": one.recall and _recall(one.recall),
        "questions": {"right": one.right, "of": len(one.answers), "answers": [asdict(a) for a in one.answers]},
    }


def _perplexity(measured: Perplexity) -> dict[str, Any]:
    return {"perplexity": measured.value, "tokens": measured.tokens}


def _recall(found: Recall) -> dict[str, Any]:
    answers = [
        {
            "kind": answer.needle.kind,
            "depth": answer.needle.depth,
            "fact": answer.needle.fact,
            "question": answer.needle.question,
            "value": answer.needle.value,
            "text": answer.text,
            "right": answer.right,
        }
        for answer in found.answers
    ]
    return {
        "right": found.right,
        "of": found.of,
        "interval": asdict(found.interval),
        "by_depth": found.by_depth(),
        "answers": answers,
    }
