"""A task from another package for data that medsilo does not know: short notes in text files.

The package also has a predictor for the sentences of new notes, and a dataset probe for `medsilo init`.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from medsilo.extend import Classification, DataError, Inference, MedsiloError, Network, SiteData, Task
from medsilo_lab.extend import DatasetLayout, Predictor

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CLASSES = ("well", "ill")


class LetterNet(Network):
    name: Literal["letter-net"] = "letter-net"

    def build(self, channels: int, classes: int) -> nn.Module:
        return nn.Linear(channels, classes)


class Notes(Task):
    """A task whose cases are sentences, represented by counts of letters.

    A site's folder has one file for each patient, in well/ for a healthy patient and in ill/ for an ill patient.
    """

    title: ClassVar[str] = "Notes: well or ill, by the letters of a sentence"
    channels: ClassVar[int] = len(LETTERS)
    goal: ClassVar[Classification] = Classification(CLASSES)
    use: ClassVar[Inference] = Inference("notes")
    needs_data: ClassVar[bool] = True

    name: Literal["notes"] = "notes"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels,)

    def default_network(self) -> Network:
        return LetterNet()

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        assert folder is not None
        folder = folder / site if (folder / site).is_dir() else folder
        files = [(path, label) for label, name in enumerate(CLASSES) for path in sorted((folder / name).glob("*.txt"))]
        read = [(sentence, label, who) for who, (path, label) in enumerate(files) for sentence in sentences(path)]
        counted, labels, patients = (np.array(column) for column in zip(*read, strict=True))
        counts = np.stack([letters(sentence) for sentence in counted])
        names = [f"{site}-{path.parent.name}-{path.stem}" for path, _ in files]
        return SiteData.by_patient(counts, labels, patients, names)


def sentences(path: Path) -> list[str]:
    found = [text.strip() for text in re.split("[.!?]", path.read_text("utf-8")) if text.strip()]
    if not found:
        raise DataError("a note has no sentence; write one", private=path.name)
    return found


def letters(sentence: str) -> np.ndarray:
    return np.array([sentence.lower().count(letter) for letter in LETTERS], np.float32)


class NotePredictor(Predictor):
    cases = "notes"

    def predict(self) -> int:
        if not (files := self.files((".txt",))):
            raise MedsiloError("there are no notes; give text files, or folders with text files")
        rows = self.predict_rows(files, self.rows_of, ("note", "sentence", "error"))
        return sum(row["error"] is not None for row in rows)

    def rows_of(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            said = sentences(path)
        except DataError as error:
            yield {"note": path.name, "error": str(error)}
            return
        inputs = torch.from_numpy(np.stack([*map(letters, said)]))
        for text, answer in zip(said, self.answers(inputs), strict=True):
            yield {"note": path.name, "sentence": text, **answer}


def look(folder: DatasetLayout) -> DatasetLayout | None:
    """Propose a plan for a folder of notes of one or several hospitals; return None for other folders."""
    names = [name for name in folder.files if name.endswith(".txt") and Path(name).parent.name in CLASSES]
    if not names:
        return None
    notes = {site: [folder.files[name] for name in own] for site, own in folder.by_hospital(names).items()}
    read, wrong = folder.opened(notes, sentences)
    each = sum(map(len, read)) / len(read)
    found = [
        f"{len(names)} notes, of about {each:.1f} sentences",
        *(f"{why} ({count})" for why, count in wrong.items()),
    ]
    return folder.choose(
        "notes",
        found,
        {site: len(own) for site, own in notes.items()},
        {
            "network.name": ("letter-net", "one layer"),
            "training.learning_rate": (0.1, "one layer learns in large steps"),
        },
        {},
        examples={site: len(own) * each for site, own in notes.items()},
    )
