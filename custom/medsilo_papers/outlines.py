"""Outlines of nuclei as Aperio's ImageScope writes them (XML), drawn as a mask."""

from pathlib import Path
from xml.parsers import expat

import numpy as np

from medsilo.extend import DataError

IGNORED = "Ambiguous"  # a class of MoNuSAC's test set
Outline = list[tuple[float, float]]


class _Reader:
    """Collects the outlines of all annotations but those of the ignored class. Document types are refused, so that no
    entity can be declared, let alone expanded."""

    def __init__(self) -> None:
        self.outlines: list[Outline] = []
        self.own: list[Outline] = []  # of the annotation that is being read
        self.ignored = False
        self.annotations = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "Annotation":
            self.own, self.ignored = [], False
            self.annotations += 1
        elif tag == "Attribute" and attributes.get("Name") == IGNORED:
            self.ignored = True
        elif tag == "Region":
            self.own.append([])
        elif tag == "Vertex":
            self.own[-1].append((float(attributes["X"]), float(attributes["Y"])))

    def end(self, tag: str) -> None:
        if tag == "Annotation" and not self.ignored:
            self.outlines += self.own

    def refuse(self, *_: object) -> None:
        raise ValueError("a document type, which annotations have no use for")


def read_outlines(path: Path) -> list[Outline]:
    """The outlines (x, y) of all nuclei of a file."""
    reader, parser = _Reader(), expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.StartDoctypeDeclHandler = reader.refuse
    try:
        parser.Parse(path.read_bytes(), True)
        if not reader.annotations:
            raise ValueError("no Annotation")
    except (OSError, expat.ExpatError, ValueError, KeyError, IndexError) as error:
        message = "an annotation is no XML with Annotation, Region and Vertex (X, Y); see this site's log for its name"
        raise DataError(message, f"{path}: {error}") from error
    return reader.outlines


def draw_outlines(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The mask of a file's nuclei: 1 inside an outline and on it, [H, W]."""
    from PIL import Image, ImageDraw

    mask = Image.new("L", (shape[1], shape[0]))
    pen = ImageDraw.Draw(mask)
    for outline in read_outlines(path):
        if len(outline) > 2:
            pen.polygon(outline, fill=1, outline=1)
    return np.array(mask)
