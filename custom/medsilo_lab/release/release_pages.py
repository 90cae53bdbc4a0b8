"""The page of a validation, for the hospital that made it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medsilo.core.text import counted
from medsilo.runs import paths
from medsilo.site import signed
from medsilo_lab.deploy import model_card
from medsilo_lab.release.release_folder import Release
from medsilo_lab.report import deciding
from medsilo_lab.report.findings import GUESSES, Notice, is_little, way
from medsilo_lab.report.formats import cell, number
from medsilo_lab.report.template import fill, save
from medsilo_lab.study import external_test

LIMITS = (
    "A score is over this hospital's cases alone, and says nothing of others.",
    "Whoever gives cases with wrong labels gets wrong scores: look at the pictures, and at how cases were chosen.",
)


PAGE = "validation.html"
DOUBT = (
    "{name} reaches {metric} {score}, and guessing {base}. A model that is wrong for these data scores so: check that "
    "files, labels, and the order of columns and classes are those of its study."
)


def remove_earlier(folder: Path, site: str) -> None:
    """Remove an earlier validation's page and pictures, so that no two answers lie side by side."""
    for path in (folder / PAGE, *_pictures(folder, site)):
        path.unlink(missing_ok=True)


def _pictures(folder: Path, site: str) -> list[Path]:
    """Return the best, the median and the worst case, as they were drawn."""
    return sorted((paths.site_folder(folder, site) / paths.PICTURES).glob("test-*.png"))


def write_page(
    path: Path, template: str, title: str, headline: str, limits: Sequence[str] = LIMITS, **content: Any
) -> Path:
    """Write a page of this folder's template, and return where it is."""
    page = fill(template, title, Path(__file__).parent, answer=headline, limits=limits, **content)
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
            cell(judged.reported["test"], missing="suppressed"),
        ]
        rows.append(((release.folder.name, f"release {release.hash[:12]}"), cells))
    first, tested = rows[0][1][0]["text"], found[0].test.scores
    headline = f"Here the model reaches {metric} {first} over {counted(tested.cases, 'case')}."
    if len(found) > 1:
        told = found[1].against(found[0])
        headline = (
            f"On the same {told.people} patients {releases[1].folder.name} is {100 * told.mean:+.1f} points from "
            f"{releases[0].folder.name} ({100 * told.low:+.1f} to {100 * told.high:+.1f})."
        )
    return write_page(
        folder / PAGE,
        PAGE,
        f"A released model at {site}",
        headline,
        context=f"{releases[0].manifest.title}; signed by {signed.fingerprint(releases[0].lead)}",
        notices=list(_doubts(releases, found)),
        n=f"n = {counted(tested.cases, 'test case')} of {counted(tested.people, 'patient')}",
        rows=rows,
        study=_study(releases[0]),
        pictures=_pictures(folder, site),
        metric=metric,
        **_classes(releases, found),
    )


def _classes(releases: Sequence[Release], found: Sequence[external_test.Judged]) -> dict[str, Any]:
    """Return the rows of each class, with its cases, and the classes with few."""
    named = [(release.folder.name, judged.exact) for release, judged in zip(releases, found, strict=True)]
    rows = [deciding.DecisionRow(name, own.decisions, own.figures) for name, own in named if own.decisions]
    labels = found[0].labels
    return {
        "classes": [line for row in rows for line in deciding.against_rest(row, labels)],
        "few": [few for row in rows[:1] for few in deciding.few_cases(row.decisions, labels)],
    }


def _doubts(releases: Sequence[Release], found: Sequence[external_test.Judged]) -> Iterator[Notice]:
    """Yield a notice for each model that is hardly better than guessing, as a wrong one is."""
    for release, judged in zip(releases, found, strict=True):
        metric, score = judged.test.metric, float(judged.test.scores.values.mean())
        table = judged.exact.decisions.confusion if judged.exact.decisions else []
        most = max(map(sum, table), default=0) / max(sum(map(sum, table)), 1)
        base = most if table else GUESSES.get(metric, judged.test.mean)
        if base is not None and is_little(way(score, base), metric):
            told = {"name": release.folder.name, "metric": metric, "score": number(score), "base": number(base)}
            yield Notice("caution", "Hardly better than guessing", DOUBT.format(**told))


def _score_cells(metric: str, score: float | None, cases: int | None) -> list[dict[str, Any]]:
    low_high = model_card.interval_of(metric, score, cases or 0) if score is not None else None
    return [cell(score, missing="suppressed"), cell(low_high), cell(cases)]


def _study(release: Release) -> list[tuple[str, list[dict[str, Any]]]]:
    metric = release.manifest.metric
    return [(site, _score_cells(metric, own.score, own.cases)) for site, own in sorted(release.manifest.study.items())]
