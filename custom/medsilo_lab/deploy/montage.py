"""Draw an overview of all predicted images. In each image, outlines show the predicted structures."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from medsilo.tasks.overlays import colours_of, outline, write_png

# The palette of Okabe and Ito: orange, sky blue, bluish green, yellow, vermilion and reddish purple. With more than six
# structures, the colours repeat.
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (213, 94, 0), (204, 121, 167))
TILE, COLUMNS, LINE = 256, 4, 16
BRIGHT = (1.0, 99.0)  # of a slice's values, the lower percentile is drawn as black, and the upper percentile as white


def tile(values: np.ndarray, labels: np.ndarray, spacing: tuple[float, ...]) -> np.ndarray:
    """Draw an image [C, (D,) H, W] and the outlines of its labels [(D,) H, W]. Return the drawing as an array [TILE,
    TILE, 3].

    For a volume, draw the slice with the most labelled voxels. `spacing` is the size of a voxel along x and y, and in
    volumes along z, in millimetres.
    """
    if labels.ndim == 3:
        depth = int((labels > 0).sum((1, 2)).argmax()) if labels.any() else len(labels) // 2
        values, labels = values[:, depth], labels[depth]
    low, high = (0.0, 255.0) if values.dtype == np.uint8 else np.percentile(values[0], BRIGHT)
    shown = ((values - low) / max(high - low, 1e-12)).clip(0, 1) * 255
    pixels = colours_of((shown.transpose(1, 2, 0) if len(shown) == 3 else shown[0]).round().astype(np.uint8))
    lengths = np.array(labels.shape) * np.array(spacing[1::-1])
    height, width = (max(1, round(TILE * length / lengths.max())) for length in lengths)
    large = np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))
    where = np.array(Image.fromarray(labels).resize((width, height), Image.Resampling.NEAREST))
    for label in np.unique(where[where > 0]):
        large[outline(where == label)] = COLOURS[(label - 1) % len(COLOURS)]
    framed = np.zeros((TILE, TILE, 3), np.uint8)
    top, left = (TILE - height) // 2, (TILE - width) // 2
    framed[top : top + height, left : left + width] = large
    return framed


def write_montage(path: Path, tiles: dict[int, np.ndarray], names: tuple[str, ...]) -> None:
    """Write numbered tiles into one image file with a legend. The names in `names` belong to the labels 1, 2, and so
    on.
    """
    columns = min(COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    page = Image.new("RGB", (columns * TILE, rows * TILE + (len(names) + 1) * LINE))
    pen = ImageDraw.Draw(page)
    for place, (number, pixels) in enumerate(tiles.items()):
        corner = (place % columns * TILE, place // columns * TILE)
        page.paste(Image.fromarray(pixels), corner)
        pen.text((corner[0] + 4, corner[1] + 2), str(number), fill="white", stroke_width=1, stroke_fill="black")
    for place, name in enumerate(names):
        colour = COLOURS[place % len(COLOURS)]
        pen.text((4, rows * TILE + 4 + place * LINE), name.encode("ascii", "replace").decode(), fill=colour)
    write_png(path, np.array(page))
