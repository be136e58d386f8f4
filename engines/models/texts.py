"""English text for measurements that anybody can repeat: nearly all of it comes with Python.

The prose of the language reference that `help()` shows (`pydoc_data.topics`). Topics are dealt out in turn, so that
calibration and held-out text share no topic and no paragraph. The text differs a little between Python versions:
compare numbers from the same one.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIN_CHARACTERS = 200
# Few of each topic: the longest five topics would otherwise fill any sample.
_PARAGRAPHS_PER_TOPIC = 3
# Some topics repeat the text of others ("compound" holds all of "for", "if" and "with"), apart from the numbers of
# footnotes.
_KEY_CHARACTERS = 80


class Part(StrEnum):
    """Which topics: `calibration` chooses (layers, weights), `heldout` judges the choice."""

    CALIBRATION = "calibration"
    HELDOUT = "heldout"


def paragraphs(part: Part) -> Iterator[tuple[str, str]]:
    """Topic name and one paragraph on one line, in a fixed order."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for index, topic in enumerate(sorted(topics)):
        blocks = [block for block in re.split(r"\n\s*\n", topics[topic]) if _is_prose(block)]
        fresh = [text for text in (" ".join(block.split()) for block in blocks) if text[:_KEY_CHARACTERS] not in seen]
        chosen = fresh[:_PARAGRAPHS_PER_TOPIC]
        seen.update(text[:_KEY_CHARACTERS] for text in chosen)
        if list(Part)[index % len(Part)] is part:
            yield from ((topic, text) for text in chosen)


def _is_prose(block: str) -> bool:
    # Grammar, code and list items are indented or hold "::="; headings are short.
    ends = block.rstrip().endswith((".", ":"))
    return len(block) >= _MIN_CHARACTERS and block[:1].isalpha() and "::=" not in block and ends


def prose(part: Part) -> str:
    """All paragraphs of `part`, an empty line between them; about 4,000 words."""
    return "\n\n".join(text for _, text in paragraphs(part))


def dialogues(part: Part, count: int) -> list[tuple[str, str]]:
    """`count` pairs of question and answer, each from another topic; the answer is the topic's first paragraph."""
    first: dict[str, str] = {}
    for topic, text in paragraphs(part):
        first.setdefault(topic, text)
    return [(f'What does the Python documentation say about "{topic}"?', text) for topic, text in first.items()][:count]


def conversations() -> list[str]:
    """Sixteen conversations that SmolLM2-135M-Instruct held with itself, in chat format, cut at 256 tokens.

    Sampled as `engines.models.healing.sampling` does, with a seed that no training uses.
    """
    lines = (Path(__file__).parent / "data" / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
