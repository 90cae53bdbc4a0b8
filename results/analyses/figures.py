"""Create figures, choose line styles and write PNG files, for all analyses. Figures are drawn by matplotlib without
opening a window, so that a figure looks the same on every machine.
"""

import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from medsilo.core.files import write_bytes

# Most colour-blind readers can distinguish Okabe and Ito's colours from each other. Lines can also be distinguished by
# their dashes, and points by their shapes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "os^Dv*Px"
DASHES = ("-", "--", ":", "-.")
DPI = 120


def panels(rows: int, columns: int, width: float = 3.0, height: float = 2.7) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with panels in rows and columns; `width` and `height` of a panel are in inches."""
    figure = Figure(figsize=(columns * width + 1.0, rows * height + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number % len(DASHES)],
    }


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG file; identical figures give byte-identical files."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    write_bytes(path, content.getvalue())
    return path
