"""One look for all pictures: colours, type, and figures that know nothing of a screen.

Colours follow the field where it has a habit (forward blue, backward green, see zero-bubble and Megatron figures). In every
comparison the prediction is pale and what was measured is dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.report.analysis import KINDS, parse_name
from atoll.trace.span import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CONTENT", "INK", "KIND_COLOURS", "MEASURED", "MUTED", "PAPER", "PREDICTED", "content_of", "figure", "kind_colour",
           "mixed", "readable_on", "save_png"]

INK = "#1d2530"
MUTED = "#6b7684"
RULE = "#dfe3e8"
IDLE = "#eef0f2"
PAPER = "#ffffff"
PREDICTED = "#a9bcd6"
MEASURED = "#27456e"
EXPOSED = "#c8566b"
WAITING = "#d9d4c7"
ACCENT = "#b4541f"
MEMORY = "#c9b8dd"

KIND_COLOURS = {"F": "#4a7fc1", "B": "#4f9d69", "I": "#e0a03c", "W": "#8fbf7f", "R": "#a7c0e2"}
OTHER_COLOURS = {"update": "#7d5ba6", "vote": "#565f6b", "commit": "#565f6b", "reduce": "#b98a5a", "native": "#c8566b",
                 "load": "#9aa3ad", "save": "#9aa3ad"}
CONTENT = {"activations": "#4a7fc1", "activation gradients": "#4f9d69", "weight gradients": "#c8566b", "votes": "#565f6b",
           "other": "#9aa3ad"}
"""Colours of what travels on a link."""

_BY_KIND = {"SEND_F": "activations", "RECV_F": "activations", "SEND_B": "activation gradients",
            "RECV_B": "activation gradients"}
_BY_BUFFER = {**dict.fromkeys(("gradient", "incoming", "partial", "reduced"), "weight gradients"),
              **dict.fromkeys(("vote", "tally", "total"), "votes")}


def kind_colour(span: Span) -> str:
    """Colour of a span of a worker's own lanes (compute, copy, disk, native)."""
    kind = parse_name(span.name).kind
    if kind in KINDS:
        return KIND_COLOURS[kind]
    lowered = kind.lower()
    for word, colour in OTHER_COLOURS.items():
        if lowered.startswith(word):
            return colour
    return OTHER_COLOURS["native"] if span.lane == "native" else CONTENT["other"]


def content_of(span: Span) -> str:
    """What a message carries, by its notation: a key of ``CONTENT``."""
    kind = parse_name(span.name).kind
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    buffer = span.name.partition(" ")[2].partition("[")[0]
    return _BY_BUFFER.get(buffer, "other")


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mixed(colour: str, other: str, share: float) -> str:
    """``colour`` with ``share`` (0..1) of ``other`` in it."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def readable_on(colour: str) -> str:
    """White or ink, whichever reads better on ``colour`` (relative luminance of WCAG 2, linearised by a square)."""
    red, green, blue = ((channel / 255) ** 2 for channel in _channels(colour))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.36 else INK


@contextmanager
def figure(width_in: float, height_in: float, dpi: int = 150) -> Iterator[Figure]:
    """A figure on the Agg canvas, in the house's type; nothing global is changed once the block is left."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look: Any = {
        "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "text.color": INK,
        "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.titlesize": 10, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
        "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelsize": 8, "ytick.labelsize": 8, "grid.color": RULE,
        "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8, "figure.facecolor": PAPER,
        "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    }
    with mpl.rc_context(look):
        drawn = Figure(figsize=(width_in, height_in), dpi=dpi)
        FigureCanvasAgg(drawn)
        yield drawn


def save_png(drawn: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, format="png", metadata={"Software": "Atoll"})
    return path
