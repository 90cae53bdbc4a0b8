"""A model at work, as its hospital sees it: charts, alarms, months, and a receipt for each month that is over."""

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded
from medsilo.deploy import watch
from medsilo.federation.protection import Protection
from medsilo.federation.seams import Place
from medsilo.flare.jobs import plan_of
from medsilo.report import charts
from medsilo.report.formats import cell
from medsilo.runs import paths
from medsilo.sealing import signing
from medsilo.site.settings import SiteSettings
from medsilo_release.control_charts import A_YEAR, Alarm, Charts
from medsilo_release.patient_sums import BLOCK, LARGEST, OUTCOME, KeptSums, Sums, WatchFolder, charted, known_of
from medsilo_release.receipts import receipt_path, write_receipt
from medsilo_release.release_folder import Release, today
from medsilo_release.release_pages import write_page

KNOWN = 30  # days after which the patients of a year are measured
FEWEST, MOST = 200, 20_000  # patients of a year that charts are made for
LIMITS = (
    "Without labels nobody sees that the same inputs have come to mean something else (another definition of the "
    "disease, other readers, wrong labels): give outcomes as they become known (--outcomes).",
    "Inputs may change and the model still be right; scores may stay alike and the model be wrong.",
    "An alarm says that cases differ from those of the validation, and not why. One in a year is expected by chance.",
    "Charts take patients for independent: a patient who comes again and again gives alarms early.",
    "A change that is smaller than the size of a chart's slack is never found.",
)


@dataclass(frozen=True)
class Watched:
    """Charts of a release at this hospital."""

    release: Release
    folder: WatchFolder
    kept: KeptSums
    charts: Charts
    shares: np.ndarray  # of the limit, [sums, names]
    alarms: Sequence[Alarm]
    outcomes: np.ndarray  # likewise, of outcomes
    wrong: Sequence[Alarm]  # that outcomes gave

    @classmethod
    def read(cls, release: Release) -> "Watched":
        """Return the charts of what is kept; raises MedsiloError where nothing is."""
        folder = WatchFolder(release.hash)
        if not folder.there:
            raise MedsiloError("this hospital does not watch that release; begin with 'medsilo validate --watch'")
        kept, reference = folder.kept(), folder.reference()
        names, known = charted(reference.names), reference.named(True)
        used = [reference.names.index(name) for name in names]
        charts = Charts.against(reference.values[:, used], names, _a_year(kept))
        seen, later = charts.of(reference.named(False)), charts.of(charted(known))
        shares, alarms = seen.run(_means(kept.cases.whole, len(seen.names)))
        told = _means(kept.outcomes.whole, len(known))[:, [known.index(name) for name in later.names]]
        outcomes, wrong = later.run(told)
        return cls(release, folder, kept, seen, shares, alarms, outcomes, wrong)

    @property
    def months(self) -> list[str]:
        """The months of which something is kept, the first first."""
        return sorted({block.month for block in (*self.kept.cases.whole, *self.kept.outcomes.whole)})


def _a_year(kept: KeptSums) -> int:
    days = (date.fromisoformat(today()) - date.fromisoformat(kept.began)).days
    sums = len(kept.cases.whole)
    return A_YEAR if min(days, sums) < KNOWN else int(np.clip(BLOCK * sums / days * 365, FEWEST, MOST))


def _means(blocks: Sequence[Sums], width: int) -> np.ndarray:
    return np.array([block.sums for block in blocks]).reshape(-1, width) / BLOCK


# ---------------------------------------------------------------------------------------------------- outcomes
def take_outcomes(release: Release, path: Path) -> int:
    """Keep the scores of cases whose outcome is known; returns how many. Each table counts once."""
    folder = WatchFolder(release.hash)
    try:
        content = read_bounded(path, LARGEST)
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"))))
        known = list(_known(rows, release.source().plan.task.goal.label_names))
    except (OSError, ValueError, csv.Error) as error:
        raise MedsiloError(
            f"--outcomes can't be read ({type(error).__name__}); give predictions.csv, with a column "
            "'outcome' (the right class) or 'score' (0 to 1)",
            str(path),
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if not folder.there or digest in folder.kept().tables:
        why = "that table counts already" if folder.there else "this hospital does not watch that release"
        raise MedsiloError(f"--outcomes: {why}; give another one", str(path))
    if not (needed := folder.reference().named(True)):
        raise MedsiloError("--outcomes: all cases of the validation have one score; there is nothing to compare with")
    if any(name not in case for case in known for name in needed):
        raise MedsiloError("--outcomes: a class or its probability lacks; add the outcomes to predictions.csv as it is")
    folder.add([], known, digest)
    return len(known)


def _known(rows: Sequence[Mapping[str, str]], labels: Sequence[str]) -> Iterator[watch.Seen]:
    """Yield what is known of each case that has a score or an outcome: a class, by its name or its number."""
    of = {**{str(n): n for n in range(len(labels))}, **{name: n for n, name in enumerate(labels)}}
    for row in rows:
        if score := (row.get("score") or "").strip():
            if not 0 <= float(score) <= 1:
                raise ValueError("a score is not between 0 and 1")
            yield known_of(float(score), labels)
        elif right := (row.get("outcome") or "").strip():
            sure = [float(own) for name, own in row.items() if str(name).startswith("probability") and own]
            hit = of.get(right, right) == of.get(row.get("class") or "", -1)
            yield known_of(float(hit), labels, of.get(right), max(sure, default=None))


# ---------------------------------------------------------------------------------------------------- by month
def receipt_of(watched: Watched, month: str, settings: SiteSettings, key: signing.PrivateKey) -> Path:
    """Write what the hospital tells of a month that is over, in its own steps, once; return where it lies."""
    reference, folder = watched.folder.reference(), watched.folder.folder
    path = receipt_path(watched.release, reference.hospital, folder, month)
    if path.exists():
        return path  # what was told stays as it was told
    if settings.privacy:
        raise MedsiloError("this hospital answers only with noise (privacy in its medsilo.yaml), which a month has not")
    own, known = watched.kept.cases.of(month), watched.kept.outcomes.of(month)
    site, release = reference.hospital, watched.release
    plan = plan_of(release.folder / release.manifest.models[0] / paths.PLAN, allowed=settings.packages)
    place = paths.site_folder(folder / f"month {month}", site)  # which stands for the study
    protection = Protection(Place(plan, site, [site], settings, place, f"release {release.hash[:12]}"))
    least = settings.least(plan.task.synthetic)
    own, known = (blocks if BLOCK * len(blocks) >= least else [] for blocks in (own, known))
    protection.note(test=bool(known) + bool(own))

    score = None
    if known and OUTCOME in reference.names:
        at, later = reference.names.index(OUTCOME), reference.named(True)
        apart = _means(known, len(later))[:, later.index(OUTCOME)].mean()
        exact = float(apart * reference.deviations[at] + reference.means[at])
        patients = [str(number) for number in range(BLOCK * len(known))]
        score = round(protection.resolution(patients).mean(exact, 0, 1), 3)
    kept, alarms = watched.kept, list[str]()
    for enough, blocks, found in ((own, kept.cases, watched.alarms), (known, kept.outcomes, watched.wrong)):
        alarms += [alarm.name for alarm in found if enough and blocks.whole[alarm.block].month == month]
    return write_receipt(
        release,
        site,
        path,
        key,
        score=score,
        cases=protection.resolution([]).count(BLOCK * len(own)) if own else None,
        month=month,
        alarms=tuple(dict.fromkeys(alarms)),
    )


def write_monitor(watched: Watched, page: Path) -> Path:
    """Write the hospital's page, for its own eyes."""
    reference, alarms = watched.folder.reference(), [*watched.alarms, *watched.wrong]
    patients, known = BLOCK * len(watched.kept.cases.whole), BLOCK * len(watched.kept.outcomes.whole)
    headline = f"No alarm over {patients} patients, and {known} whose outcome is known."
    if alarms:
        last = f"{alarms[-1].name} by {alarms[-1].drift:+.2f} deviations"
        headline = f"{len(alarms)} alarms over {patients} patients; the last: {last}."
    lines = [charts.Series("highest of all charts", watched.shares.max(1).tolist() if len(watched.shares) else [])]
    lines += [charts.Series("outcomes", watched.outcomes.max(1).tolist(), 1)] if known else []
    longest = max(len(lines[0].values), len(lines[-1].values))
    lines += [charts.Series("limit: one false alarm a year", [1.0] * longest, -1)]
    top = max(1.5, *(value or 0 for line in lines for value in line.values)) if longest else 1.5
    chart = charts.line_chart(
        lines, key="control", title="Control charts", x_label=f"{BLOCK} patients each", y_label="share of the limit",
        y_ticks=[0, 0.5, 1, round(top, 1)], last_x=max(1, longest - 1), unit="sums",
    )  # fmt: skip
    return write_page(
        page,
        "monitor.html",
        f"A released model at work at {reference.hospital}",
        headline,
        LIMITS,
        context=f"Release {watched.release.hash[:12]} of {watched.release.manifest.made}",
        chart=chart if longest else None,
        lines=[line.name for line in lines],
        alarms=[(alarm.name, f"{alarm.drift:+.2f}", BLOCK * (alarm.block + 1)) for alarm in alarms],
        rows=list(_rows(watched)),
        months=watched.months,
        beside=list(_beside(watched)),
        cases=len(reference.cases),
    )


def _rows(watched: Watched) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each number: its mean in the validation, and its drift in each month."""
    reference, names = watched.folder.reference(), watched.charts.names
    for place, name in enumerate(names):
        at = list(reference.names).index(name)
        drifts = []
        for month in watched.months:
            own = _means(watched.kept.cases.of(month), len(names))
            drifts.append(cell(None, f"{own[:, place].mean():+.2f}") if len(own) else cell(None))
        now = watched.shares[-1, place] if len(watched.shares) else 0.0
        yield name, [cell(None, f"{reference.means[at]:.4g}"), cell(None, f"{100 * now:.0f} %"), *drifts]


def _beside(watched: Watched) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield what the validation does not know, spacing, values as they are stored and scanners, by month."""
    for name in sorted({name for block in watched.kept.cases.whole for name in block.beside}):
        cells = []
        for month in watched.months:
            own = [block.beside.get(name, 0.0) / BLOCK for block in watched.kept.cases.of(month)]
            cells.append(cell(None, f"{np.mean(own):.4g}" if own else None))
        yield name, cells
