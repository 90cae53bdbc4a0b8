"""The page of a validation, for the hospital that made it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medsilo.site import signed
from medsilo_lab.deploy import model_card
from medsilo_lab.release.release_folder import Release
from medsilo_lab.report.formats import cell
from medsilo_lab.report.template import fill, save
from medsilo_lab.study import external_test

LIMITS = (
    "A score is over this hospital's cases alone, and says nothing of others.",
    "Whoever gives cases with wrong labels gets wrong scores: look at the pictures, and at how cases were chosen.",
)


def write_page(
    path: Path, template: str, title: str, headline: str, limits: Sequence[str] = LIMITS, **content: Any
) -> Path:
    """Write a page of this folder's template, and return where it is."""
    page = fill(template, title, Path(__file__).parent, answer=headline, notices=[], limits=limits, **content)
    return save(page, path)


def write_validation(
    releases: Sequence[Release], found: Sequence[external_test.Judged], site: str, folder: Path
) -> Path:
    """Write the hospital's page, for its own eyes: exact scores, intervals, pictures."""
    metric, rows = releases[0].manifest.metric, []
    for release, judged in zip(releases, found, strict=True):
        scores = judged.test.scores
        cells = [
            cell(float(scores.values.mean())),
            cell(judged.test.interval, missing="too few patients"),
            cell(scores.cases),
            cell(scores.people),
            cell(judged.told["test"], missing="not told"),
        ]
        rows.append(((release.folder.name, f"release {release.hash[:12]}"), cells))
    first = rows[0][1][0]["text"]
    headline = f"Here the model has a {metric} of {first} over {found[0].test.scores.cases} cases."
    if len(found) > 1:
        told = found[1].against(found[0])
        headline = (
            f"On the same {told.people} patients {releases[1].folder.name} is {100 * told.mean:+.1f} points from "
            f"{releases[0].folder.name} ({100 * told.low:+.1f} to {100 * told.high:+.1f})."
        )
    return write_page(
        folder / "validation.html",
        "validation.html",
        f"A released model at {site}",
        headline,
        context=f"{releases[0].manifest.title}; signed by {signed.fingerprint(releases[0].lead)}",
        rows=rows,
        study=_study(releases[0]),
        pictures=sorted(folder.glob("**/test-*.png")),
        metric=metric,
    )


def _told(metric: str, score: float | None, cases: int | None) -> list[dict[str, Any]]:
    low_high = model_card.interval_of(metric, score, cases or 0) if score is not None else None
    return [cell(score, missing="not told"), cell(low_high), cell(cases)]


def _study(release: Release) -> list[tuple[str, list[dict[str, Any]]]]:
    metric = release.manifest.metric
    return [(site, _told(metric, own.score, own.cases)) for site, own in sorted(release.manifest.study.items())]
