"""Read the rhythms in WFDB annotation files, such as those of PhysioNet's MIT-BIH databases. Beats are not read."""

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from medsilo.extend import DataError
from medsilo_series.waves import WFDB, Wave, beside

SKIP, NUMBER, SUBTYPE, CHANNEL, TEXT = 59, 60, 61, 62, 63  # codes of words that do not begin an annotation
RHYTHM = 28  # code of an annotation whose text names the rhythm that begins
# text of an annotation that states the number of time steps per second, if this number differs from the sampling rate
RESOLUTION = "## time resolution: "
LARGEST = 1 << 24  # maximum bytes of an annotation file
ABSENT = "recordings have no annotation file with the ending data.recording_columns.label; copy it beside each"
DAMAGED = "an annotation file is damaged, or not in WFDB's format; copy it again"
WITHOUT = "annotation files have no rhythm; leave the recordings out, or annotate the rhythm where it begins"


def is_ending(label: str | None) -> bool:
    """Return True if a site's settings give as label the file ending of annotation files, such as .atr, instead of a
    column's name.
    """
    return label is not None and label.startswith(".")


def annotations_of(header: Path, ending: str) -> Path:
    """Return the annotation file of a WFDB recording; raise DataError if the file is not in the folder of the
    recording's header.
    """
    if header.suffix.lower() != WFDB:
        raise DataError("only WFDB recordings have annotation files; name a column under data.recording_columns.label")
    return beside(header, f"{header.stem}{ending}", ABSENT)


def rhythms_in(path: Path, wave: Wave) -> list[tuple[int, str]]:
    """Return the rows of a recording at which a rhythm begins, and for each of these rows the rhythm's code without its
    parenthesis.
    """
    try:
        data = path.read_bytes() if path.stat().st_size <= LARGEST else b""
        own = list(_annotations(data))
        rate = next(
            (float(text.removeprefix(RESOLUTION)) for *_, text in own if text.startswith(RESOLUTION)), wave.rate
        )
        begins = [(round(time * wave.rate / rate), text[1:]) for time, code, text in own if _is_rhythm(code, text)]
    except (OSError, ValueError, ArithmeticError, struct.error) as error:
        raise DataError(DAMAGED, str(error)) from error
    return sorted(begins, key=lambda begin: begin[0])


def rhythm_of_rows(path: Path, wave: Wave) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the rhythms of a recording, and for each row of the recording the index of the row's rhythm. The rhythm of
    a row before the first annotated rhythm is the empty text.
    """
    if not (begins := rhythms_in(path, wave)):
        raise DataError(WITHOUT)
    names = ("", *sorted({name for _, name in begins} - {""}))
    rows = np.zeros(wave.rows, np.int32)
    for (first, name), (last, _) in pairwise([*begins, (wave.rows, "")]):
        rows[max(first, 0) : max(last, 0)] = names.index(name)
    return names, rows


def _is_rhythm(code: int, text: str) -> bool:
    return code == RHYTHM and text.startswith("(")


def _annotations(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield the time, the code and the text of each annotation. Each word of an annotation file has 16 bits: a code in
    the upper 6 bits, and a number in the lower 10 bits. If a word begins an annotation, the word's number is the time
    since the previous annotation.
    """
    place, time, code, text = 0, 0, 0, ""
    while word := struct.unpack_from("<H", data, place)[0]:
        kind, number, place = word >> 10, word & 1023, place + 2
        if kind == TEXT:
            if place + number > len(data):
                raise ValueError("a text ends after the file")
            text = data[place : place + number].partition(b"\0")[0].decode("latin-1").strip()
            place += number + number % 2  # a padding byte follows a text whose length is odd
        elif kind == SKIP:
            upper, lower = struct.unpack_from("<hH", data, place)
            yield time, code, text
            time, code, text, place = time + (upper << 16 | lower), 0, "", place + 4
        elif kind not in (NUMBER, SUBTYPE, CHANNEL):
            yield time, code, text
            time, code, text = time + number, kind, ""
    yield time, code, text
