"""Plots as SVG that stands inside an HTML page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: distinct for colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#777777"


def panels(count: int) -> tuple[Figure, list[Any]]:
    """A figure and its axes, side by side."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes: list[Axes] = [figure.add_subplot(1, count, panel + 1) for panel in range(count)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def colour(index: int) -> str:
    """Of the palette, over and over."""
    return COLOURS[index % len(COLOURS)]


def svg(figure: Figure, name: str) -> str:
    """SVG text; its ids carry `name`, so that several fit in one page, and equal figures are equal text."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata=nothing)
    # The XML head and the document type have no place inside HTML.
    found = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", found)
