"""The layer-dropping study as Markdown, with curves drawn in text: no plotting library, and readable in a terminal."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from engines.models.perplexity import STRIDE_TOKENS, WINDOW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.judge import Judgement
    from engines.models.study import Candidate, Study, StudySize

_BAR_COLUMNS = 40
# Block influence and perplexity both span powers of ten, with nearly every layer at the low end: longer bars would show
# one layer.
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(value: float, largest: float, columns: int = _BAR_COLUMNS) -> str:
    """A bar for `value` on a scale from 0 to `largest`, to an eighth of a column; "→" marks one that was cut."""
    if value > largest:
        return "█" * (columns - 1) + "→"
    eighths = round(8 * columns * max(value, 0.0) / largest)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def markdown(study: Study, size: StudySize) -> str:
    """Sections: how it was measured, candidates, curves of all layers, answers."""
    parts = [_setting(size), _candidates(study), _layers(study, size), _answers(study.candidates)]
    return "\n\n".join(parts) + "\n"


def influence_lines(influence: Sequence[float]) -> list[str]:
    """One line a layer: number, block influence, bar. The scale ends at four times the median."""
    scale = 4 * sorted(influence)[len(influence) // 2]
    return [f"{layer:>3}  {value:7.4f}  {bar(value, scale)}" for layer, value in enumerate(influence)]


def _setting(size: StudySize) -> str:
    windows = f"window {WINDOW_TOKENS}, stride {STRIDE_TOKENS}"
    return (
        f"Python {platform.python_version()}; {size.calibration_tokens} tokens of calibration prose for influence, the "
        f"first {size.search_tokens} of them for the search; {size.heldout_tokens} tokens of held-out prose "
        f"({windows}) and {size.dialogues} held-out answers in chat format to judge."
    )


def _candidates(study: Study) -> str:
    lines = [
        "| dropped layers | chosen | parameters | perplexity, prose | perplexity, chat answers | right answers |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {_names(candidate)} | {candidate.how} | {_figures(candidate.judgement)} |" for candidate in study.candidates
    ]
    return "\n".join(lines)


def _figures(judged: Judgement) -> str:
    right = f"{judged.right} of {len(judged.answers)}"
    return f"{judged.parameters / 1e6:.1f} M | {judged.prose.value:.2f} | {judged.chat.value:.2f} | {right}"


def _layers(study: Study, size: StudySize) -> str:
    whole = study.candidates[0].judgement.prose.value
    # Anything beyond this is broken, however far.
    scale = 4 * whole
    rows = [
        f"{layer:>3}  {influence:7.4f} {single:10.2f}  {bar(single, scale)}"
        for layer, (influence, single) in enumerate(zip(study.influence, study.single, strict=True))
    ]
    head = f"layer  influence  perplexity without it ({size.search_tokens} calibration tokens; bar: 0 to {scale:.0f})"
    return "\n".join(
        ["```text", head, *rows, "```", "", "```text", "layer  influence", *influence_lines(study.influence), "```"]
    )


def _answers(candidates: Sequence[Candidate]) -> str:
    lines = ["Answers, by dropped layers (✓ right, ✗ wrong):"]
    for candidate in candidates:
        judged = candidate.judgement
        lines += ["", f"<details><summary>{_names(candidate)}: {judged.right} right</summary>", ""]
        lines += [f"- {'✓' if a.right else '✗'} {a.question} *{_plain(a.text)}*" for a in judged.answers]
        lines += ["", "</details>"]
    return "\n".join(lines)


def _plain(text: str) -> str:
    # Models write Markdown and HTML; here both are quotations.
    for sign, quoted in (("*", "\\*"), ("_", "\\_"), ("`", "\\`"), ("<", "&lt;")):
        text = text.replace(sign, quoted)
    return text.strip() or "(nothing)"


def _names(candidate: Candidate) -> str:
    return ", ".join(map(str, candidate.dropped)) or "none"
