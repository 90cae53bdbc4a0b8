"""The page for accepting a data set shows columns, duplicate images, and cases with masks."""

import re
import stat
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from medsilo.cli import main
from tests.hospital import write_pixels, write_table

PATIENTS = 24


def page(out: Path) -> str:
    path = out / "page.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", text)
    return unescape(text)


def row(text: str, first: str) -> list[str]:
    found = re.search(rf'<tr><th scope="row">{re.escape(first)}</th>(.*?)</tr>', text, re.DOTALL)
    assert found, first
    return [re.sub(r"<svg.*?</svg>|<[^>]*>", "", cell, flags=re.DOTALL) for cell in found[1].split("</td>")[:-1]]


def test_a_tables_page_has_each_column_with_its_missing_values(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    rows = [
        {
            "Patient ID": f"MUSTER-{who}",
            "age": "" if who < 3 else int(drawn.integers(30, 80)),
            "sex": "fm"[who % 4 // 2],
            "<b>note": "free words about this patient and how it went",
            "outcome": ("no", "yes")[who % 2],
        }
        for who in range(PATIENTS)
    ]
    (tmp_path / "data").mkdir()
    write_table(tmp_path / "data/registry.csv", rows)
    assert main(["data", str(tmp_path / "data"), "-o", str(tmp_path / "set"), "--yes", "--target", "outcome"]) == 0
    text = page(tmp_path / "set")
    ages = [int(one["age"]) for one in rows if one["age"] != ""]
    assert row(text, "age") == ["input", f"3 of {PATIENTS}", f"{min(ages)} to {max(ages)}, median {np.median(ages):g}"]
    assert row(text, "Patient ID") == ["names the patient", "none", f"{PATIENTS} values"]
    assert row(text, "outcome") == ["outcome", "none", "no (12), yes (12)"]
    assert row(text, "sex")[2] == "f (12), m (12)"
    assert row(text, "<b>note")[0] == "not used" and "free words" not in text and "MUSTER" not in text
    assert "<b>note" not in (tmp_path / "set/page.html").read_text()
    assert text.count("<svg") == 1


@pytest.mark.parametrize("masks", [True, False])
def test_an_image_folders_page_has_ten_cases_and_names_files_that_are_there_twice(tmp_path: Path, masks: bool) -> None:
    drawn, data = np.random.default_rng(0), tmp_path / "data"
    for who in range(PATIENTS):
        name = f"p{who:02}_a.png"
        image = drawn.integers(0, 256, (64, 64, 3)).astype(np.uint8)
        if masks:
            mask = np.zeros((64, 64), np.uint8)
            mask[: 8 + who, :32] = 255
            write_pixels(data / "masks" / name, mask)
        write_pixels(data / ("images" if masks else ("benign", "malignant")[who % 2]) / name, image)
    first = data / ("images" if masks else "benign") / "p00_a.png"
    (data / "notes").mkdir()
    (data / "notes/copy.png").write_bytes(first.read_bytes())
    (data / "notes/copy.png").rename(first.with_name("p00_b.png"))
    if masks:
        (data / "masks/p00_b.png").write_bytes((data / "masks/p00_a.png").read_bytes())
    answers = ["--set", "patients=(p[0-9]+)_"]
    (data / "notes").rmdir()
    assert main(["data", str(data), "-o", str(tmp_path / "set"), "--yes", *answers]) == 0
    text = page(tmp_path / "set")
    assert text.count("data:image/png;base64,") == 10
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert all(re.search(r"structure \d+\.\d %" if masks else "benign|malignant", one) for one in captions)
    folder = "images" if masks else "benign"
    assert f"{folder}/p00_a.png, {folder}/p00_b.png" in text
