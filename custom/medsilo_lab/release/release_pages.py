"""Write the page with the results of a validation, for the hospital at which the validation ran."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medsilo.core.text import counted
from medsilo.runs import paths
from medsilo.runs.score import number_text
from medsilo.site import signed
from medsilo_lab.deploy import model_card
from medsilo_lab.release import external_test
from medsilo_lab.release.release_folder import Release
from medsilo_lab.report import decision
from medsilo_lab.report.formats import cell, score_cell
from medsilo_lab.report.run_warnings import GUESSES, is_little, way
from medsilo_lab.report.template import fill, save
from medsilo_lab.study.verdict_file import Notice
from medsilo_lab.study.words import NO_INTERVAL, points

LIMITS = (
    "A score is over this hospital's cases alone, and says nothing of others.",
    "Whoever gives cases with wrong labels gets wrong scores: look at the pictures, and at how cases were chosen.",
)


PAGE = "validation.html"
DOUBT = (
    "{name} reaches {metric} {score}, and {guess} {base}. A model that is wrong for these data scores so: check that "
    "files, labels, and the order of columns and classes are those of its study."
)
SEEN_THERE = (
    "{name} was trained at {site}. Some of the tested patients trained the model, so the score is higher than for new "
    "patients. The score of the release's study at {site} is over patients who did not train the model."
)


def remove_earlier(folder: Path, site: str) -> None:
    """Remove the page and the pictures of an earlier validation, whose results might be mistaken for new results."""
    for path in (folder / PAGE, *_pictures(folder, site)):
        path.unlink(missing_ok=True)


def _pictures(folder: Path, site: str) -> list[Path]:
    return sorted((paths.site_folder(folder, site) / paths.PICTURES).glob("test-*.png"))


def write_page(
    path: Path, template: str, title: str, headline: str, limits: Sequence[str] = LIMITS, **content: Any
) -> Path:
    page = fill(template, title, Path(__file__).parent, answer=headline, limits=limits, **content)
    return save(page, path)


def write_validation(
    releases: Sequence[Release], found: Sequence[external_test.Judged], site: str, folder: Path
) -> Path:
    """Write the validation page, with exact scores, intervals and pictures, for the hospital's own staff."""
    metric, rows = releases[0].manifest.metric, []
    for release, judged in zip(releases, found, strict=True):
        scores = judged.test.scores
        cells = [
            score_cell(judged.score),
            _interval_cell(judged),
            cell(scores.cases),
            cell(scores.people),
            score_cell(judged.leaving),
        ]
        rows.append(((release.folder.name, f"release {release.hash[:12]}"), cells))
    first, tested = rows[0][1][0]["text"], found[0].test.scores
    headline = f"Here the model reaches {metric} {first} over {counted(tested.cases, 'case')}."
    if not found[0].score.known:
        headline = f"The {counted(tested.cases, 'case')} here have no {metric}, as cases of one class have no AUROC."
    elif len(found) > 1:
        told = found[1].against(found[0])
        ends = max(told.low, -1.0), min(told.high, 1.0)
        within = NO_INTERVAL if ends == (-1.0, 1.0) else " to ".join(map(points, ends))
        headline = (
            f"On the same {told.people} patients {releases[1].folder.name} is {points(told.mean)} points from "
            f"{releases[0].folder.name} ({within})."
        )
    return write_page(
        folder / PAGE,
        PAGE,
        f"A released model at {site}",
        headline,
        context=f"{releases[0].manifest.title}; signed by {signed.fingerprint(releases[0].lead)}",
        notices=doubts(releases, found, site),
        n=f"n = {counted(tested.cases, 'test case')} of {counted(tested.people, 'patient')}",
        rows=rows,
        study=_study(releases[0]),
        pictures=_pictures(folder, site),
        metric=metric,
        **_classes(releases, found),
    )


def _interval_cell(judged: external_test.Judged) -> dict[str, Any]:
    if judged.score.known and judged.test.interval:
        return cell(judged.test.interval, n=judged.score.n)
    return cell(None, "too few patients") if judged.score.known else cell(None)


def _classes(releases: Sequence[Release], found: Sequence[external_test.Judged]) -> dict[str, Any]:
    named = [(release.folder.name, judged.exact) for release, judged in zip(releases, found, strict=True)]
    rows = [decision.DecisionRow(name, own.decisions, own.figures) for name, own in named if own.decisions]
    labels = found[0].labels
    return {
        "rates": decision.RATES,
        "classes": [line for row in rows for line in decision.against_rest(row, labels)],
        "few": [few for row in rows[:1] for few in decision.few_cases(row.decisions, labels)],
    }


def doubts(releases: Sequence[Release], judged: Sequence[external_test.Judged], site: str) -> list[Notice]:
    return [*_seen(releases, judged, site), *_doubts(releases, judged)]


def _seen(releases: Sequence[Release], found: Sequence[external_test.Judged], site: str) -> Iterator[Notice]:
    for release, judged in zip(releases, found, strict=True):
        if judged.seen:
            told = SEEN_THERE.format(name=release.folder.name, site=site)
            yield Notice(kind="caution", word="Patients seen in training", text=told)


def _doubts(releases: Sequence[Release], found: Sequence[external_test.Judged]) -> Iterator[Notice]:
    """Yield a warning for each model that is hardly better than guessing: the reason may be an error in the data or in
    the release.
    """
    for release, judged in zip(releases, found, strict=True):
        metric, score = judged.test.metric, float(judged.test.scores.values.mean())
        table = judged.exact.decisions.confusion if judged.exact.decisions else []
        most = max(map(sum, table), default=0) / max(sum(map(sum, table)), 1)
        known = {
            **GUESSES,
            "balanced_accuracy": 1 / max(len(judged.labels), 1),
            **({"accuracy": most} if table else {}),
        }
        base = known.get(metric, judged.test.mean)
        if base is not None and is_little(way(score, base), metric):
            here, guessed = (number_text(one, judged.test.scores.people) for one in (score, base))
            guess = "always saying the most frequent class" if metric == "accuracy" and table else "guessing"
            told = {"name": release.folder.name, "metric": metric, "score": here, "base": guessed, "guess": guess}
            yield Notice(kind="caution", word="Not learned", text=DOUBT.format(**told))


def _study(release: Release) -> list[tuple[str, list[dict[str, Any]]]]:
    metric = release.manifest.metric
    rows = []
    for site, own in sorted(release.manifest.study.items()):
        interval = model_card.interval_of(metric, own.told)
        rows.append((site, [score_cell(own.told), cell(interval, n=own.cases), cell(own.cases)]))
    return rows
