"""The demo's page: a comparison's page with a story before it."""

from dataclasses import dataclass
from pathlib import Path

from medsilo.report.read import read
from medsilo.report.study_page import write_study
from medsilo.runs.reading import read_verdict
from medsilo.runs.schema import Verdict


@dataclass(frozen=True)
class StoryRows:
    """The rows that the story is about, and how the study under NVFlare compares."""

    pictured: str  # the row whose first run has pictures of the hospitals' images
    tensors: int
    different: int | None  # None where the simulator failed


def write_demo(folder: Path, told: StoryRows) -> Path:
    """Write the demo's page and return where it is."""
    verdict = read_verdict(folder)
    story = {
        "pictures": _pictures(folder, verdict, told.pictured),
        "tensors": told.tensors,
        "different": told.different,
    }
    return write_study(folder, template="demo.html", story=story)


def _pictures(folder: Path, verdict: Verdict, title: str) -> dict[str, list[str]]:
    """Return each hospital's images, from the first run of a row that keeps them."""
    runs = [run.run for run in verdict.runs if run.row == title]
    found = read(folder / runs[0]).pictures if runs else {}
    return {site: [before for before, _ in pairs] for site, pairs in found.items()}
