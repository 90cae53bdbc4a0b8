"""Changes at one of eight hospitals, and how soon the control charts of a released model see them.

    python -m benchmarks.monitor [--runs N] [--write]

Prints docs/results/monitor.md, which --write writes. About four minutes on a free core. How charts are
made was chosen on other patients than these (seeds from 1000 on; the page has those from 2000 on).
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from medsilo.deploy.source import Source
from medsilo.federation import inprocess
from medsilo.plan import Plan, parse_plan
from medsilo.sealing import signing
from medsilo_release.control_charts import A_YEAR, SHARES, YEARS, Alarm, Charts
from medsilo_release.patient_sums import BLOCK, FAR, KNOWN, OUTCOME, Measuring, charted, group_of, known_of_all
from medsilo_release.release_folder import Release, write_release

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "results" / "monitor.md"
SHIFT = 0.3  # how much hospitals look different; a model of FedAvg is good enough then to be released
SITES = [f"hospital-{number}" for number in range(1, 9)]
BEFORE, WITHIN, SHARE = 100, 100, 0.3  # patients before the change and after it; of the second class
REFERENCE = 200  # patients of the validation
WANTED = 0.9
ORACLES = ("prevalence", "label noise")  # changes of which the likelihood can be written
SIZES = ("small", "medium", "large")
CHANGES = {
    "scanner": ("contrast times 0.95, 0.85 or 0.7", (0.95, 0.85, 0.7)),
    "prevalence": (f"the second class {SHARE:.0%} before; 0.4, 0.5 or 0.7 after", (0.4, 0.5, 0.7)),
    "label noise": ("0.1, 0.2 or 0.4 of the labels are the other one", (0.1, 0.2, 0.4)),
    "artefact": ("a black square of 3, 8 or 16 pixels on every third image", (3, 8, 16)),
}


Measured = tuple[np.ndarray, list[str]]  # [patients, names], and these


@dataclass(frozen=True)
class Pool:
    """Numbers of a hospital's patients, [patients, names], as they are and by what has changed."""

    names: list[str]
    usual: np.ndarray
    changed: dict[tuple[str, str], np.ndarray]


def released(folder: Path, rounds: int, patients: int) -> Release:
    """Train a model over eight hospitals of different looks, and release it."""
    study: dict[str, object] = {
        "algorithm": {"name": "fedavg"},
        "task": {"name": "synthetic-histology", "patients": patients, "shift": SHIFT},
        "training": {"rounds": rounds},
        "participation": {"sites": SITES},
        "layers": [{"name": "promise"}],
    }
    plan = parse_plan(study)
    inprocess.run(plan, folder=folder / "study")
    key = signing.own_key(folder / "key.pem", "releases")
    return write_release([folder / "study"], "", folder / "release", key)


def pool_of(release: Release, site: str, patients: int, changing: int) -> Pool:
    """Draw patients that nobody trained with, and measure them as they are and changed."""
    measuring = Measuring(source := release.source())
    usual, names = _measured(measuring, source, *_with(SHARE, *_drawn(source.plan, site, patients, 1)))
    both, right = _drawn(source.plan, site, changing, 2)
    changed: dict[tuple[str, str], np.ndarray] = {}
    for kind, (_, sizes) in CHANGES.items():
        for name, size in zip(SIZES, sizes, strict=True):
            images, labels = _with(size if kind == "prevalence" else SHARE, both, right)
            if kind == "scanner":
                images = 0.5 + (images - 0.5) * size
            if kind == "label noise":
                wrong = torch.from_numpy(np.random.default_rng(3).random(len(labels)) < size)
                labels = torch.where(wrong, 1 - labels, labels)
            if kind == "artefact":
                images[::3, :, 4 : 4 + int(size), 4 : 4 + int(size)] = 0
            changed[kind, name] = _measured(measuring, source, images, labels)[0]
    return Pool(names, usual, changed)


def _drawn(plan: Plan, site: str, patients: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two images of each patient, one after the other: of the first class and of the second."""
    task = plan.task.model_copy(update={"patients": patients, "patches": 2})
    data = task.load(site, SITES, 2000 + seed, None)
    parts = (data.train, data.validation, data.test)
    images, labels = (torch.cat([getattr(part, which) for part in parts]) for which in ("inputs", "targets"))
    assert labels[::2].sum() == 0 and labels[1::2].all()
    return images, labels


def _with(share: float, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one image of each patient; a share of them is of the second class."""
    wanted = np.random.default_rng(4).random(len(images) // 2) < share
    places = torch.from_numpy(2 * np.arange(len(wanted)) + wanted)
    return images[places], labels[places]


@torch.inference_mode()
def _measured(measuring: Measuring, source: Source, images: torch.Tensor, labels: torch.Tensor) -> Measured:
    rows = []
    for some, right in zip(images.split(200), labels.split(200), strict=True):
        output = source.network(some)
        seen = measuring.measure(some, output, source.said(output, some))
        goal = source.plan.task.goal
        known = known_of_all(goal, goal.metric, goal.measures(output, right))
        rows += [{**own, **later} for own, later in zip(seen, known, strict=True)]
    return np.array([list(row.values()) for row in rows]), list(rows[0])


# ---------------------------------------------------------------------------------------------------- what is possible
@dataclass(frozen=True)
class Oracle:
    """The best that any chart can do (Moustakides 1986): a sum of log likelihood ratios by who knows the change.

    It knows how patients were before and how they are after, and spends the year's false alarm on this change alone.
    Of scanner and artefact nobody can write the likelihood.
    """

    kind: str
    size: float
    label: int  # the column of what was known
    numbers: np.ndarray  # columns that are known at once
    line: np.ndarray  # a logistic regression of the label on them
    scale: tuple[np.ndarray, np.ndarray]
    limits: tuple[float, ...] = ()  # with the whole year's false alarm, and with the share that each of our charts has

    @classmethod
    def of(cls, pool: Pool, kind: str, size: float) -> "Oracle":
        """Return the oracle of a hospital and a change; its limit is found from other years than those of the page."""
        numbers = np.array([group_of(name) != OUTCOME for name in pool.names]) & (pool.usual.std(0) > 1e-6)
        label = next(place for place, name in enumerate(pool.names) if name.startswith(KNOWN))
        scale = (pool.usual[:, numbers].mean(0), pool.usual[:, numbers].std(0))
        own = cls(kind, size, label, numbers, np.zeros(numbers.sum() + 1), scale)
        own = replace(own, line=_logistic(own._given(pool.usual), pool.usual[:, label]))
        told, later = own.ratios(pool.usual), sum(group_of(name) == OUTCOME for name in charted(pool.names))
        years = told[np.random.default_rng(7).integers(len(told), size=(A_YEAR, YEARS))]
        return replace(own, limits=tuple(own._limit(years, share) for share in (1.0, SHARES[OUTCOME] / (2 * later))))

    def _limit(self, years: np.ndarray, share: float) -> float:
        low, high = 0.0, 15.0
        for _ in range(12):
            middle = (low + high) / 2
            many = np.mean([len(alarms) for alarms in self.alarms(years, middle)])
            low, high = (middle, high) if many > share else (low, middle)
        return high

    def _given(self, patients: np.ndarray) -> np.ndarray:
        return np.c_[np.ones(len(patients)), (patients[:, self.numbers] - self.scale[0]) / self.scale[1]]

    def ratios(self, patients: np.ndarray) -> np.ndarray:
        """Return by how much each patient speaks for the change."""
        second = patients[:, self.label] > 0.5
        if self.kind == "prevalence":
            return np.where(second, np.log(self.size / SHARE), np.log((1 - self.size) / (1 - SHARE)))
        chance = 1 / (1 + np.exp(-self._given(patients) @ self.line))
        right = np.where(second, chance, 1 - chance).clip(1e-6)
        return np.log(1 - self.size + self.size * (1 - right) / right)

    def alarms(self, ratios: np.ndarray, limit: float) -> list[list[int]]:
        """Return the patients at whom there is an alarm, of each stream. ratios: [patients, streams]."""
        total, found = np.zeros(ratios.shape[1]), [list[int]() for _ in ratios.T]
        for number, own in enumerate(ratios):
            total = np.maximum(0, total + own)
            for stream in np.flatnonzero(total > limit):
                found[stream].append(number)
            total[total > limit] = 0
        return found


def _logistic(given: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return a logistic regression's coefficients, by Newton's steps."""
    line = np.zeros(given.shape[1])
    for _ in range(20):
        chance = 1 / (1 + np.exp(-given @ line))
        slope = given.T @ (chance - right) + line
        line -= np.linalg.solve(given.T @ (given * (chance * (1 - chance))[:, None]) + np.eye(len(line)), slope)
    return line


# ---------------------------------------------------------------------------------------------------- runs
@dataclass
class Found:
    """The first alarm after a change, of each run; None where there was none."""

    alarms: list[Alarm | None]

    @property
    def share(self) -> float:
        """The share of runs with an alarm."""
        return sum(alarm is not None for alarm in self.alarms) / len(self.alarms)


Case = tuple[str, str]  # a change and its size


def run(
    pools: list[Pool], runs: int
) -> tuple[dict[Case, Found], dict[Case, Found], dict[Case, list[list[bool]]], list[int]]:
    """Return what was found with outcomes, without, and by the oracle, and the alarms of a year without a change."""
    known: dict[Case, Found] = {}
    blind: dict[Case, Found] = {}
    best: dict[Case, list[list[bool]]] = {}
    oracles = [
        {
            (kind, size): Oracle.of(pool, kind, how)
            for kind in ORACLES
            for size, how in zip(SIZES, CHANGES[kind][1], strict=True)
        }
        for pool in pools
    ]
    years = []
    for number in range(runs):
        pool, draw = pools[number // 2 % len(pools)], np.random.default_rng(number)
        order = np.random.default_rng([number // 2, 1]).permutation(len(pool.usual))  # two runs have one reference
        reference, rest = pool.usual[order[:REFERENCE]], pool.usual[order[REFERENCE:]]
        means, apart = reference.mean(0), reference.std(0)
        used = (apart > 1e-6) & np.isin(pool.names, charted(pool.names))
        names = [name for name, own in zip(pool.names, used, strict=True) if own]

        def within(patients: np.ndarray) -> np.ndarray:
            own = ((patients - means) / np.where(used, apart, 1))[:, used]  # noqa: B023
            late = np.array([group_of(name) == OUTCOME for name in names])  # noqa: B023
            return np.where(late, own, own.clip(-FAR, FAR))

        def blocks(patients: np.ndarray) -> np.ndarray:
            whole = within(patients)[: len(patients) // BLOCK * BLOCK]
            return whole.reshape(-1, BLOCK, whole.shape[1]).mean(1)

        if number % 2 == 0:
            charts = Charts.against(within(reference), names)
        years.append(len(charts.run(blocks(rest[draw.integers(len(rest), size=A_YEAR)]))[1]))
        first = rest[draw.permutation(len(rest))[:BEFORE]]
        for case, later in {("none", "–"): rest, **pool.changed}.items():
            after = later[draw.permutation(len(later))[:WITHIN]]
            stream = blocks(np.concatenate([first, after]))
            for found, shown in ((known, names), (blind, [name for name in names if group_of(name) != OUTCOME])):
                alarms = charts.of(shown).run(stream[:, [names.index(name) for name in shown]])[1]
                late = [alarm for alarm in alarms if alarm.block >= BEFORE // BLOCK]
                found.setdefault(case, Found([])).alarms.append(late[0] if late else None)
            if oracle := oracles[number // 2 % len(pools)].get(case):
                told = oracle.ratios(np.concatenate([first, after]))[:, None]
                seen = [oracle.alarms(told, limit)[0] for limit in oracle.limits]
                best.setdefault(case, []).append([any(patient >= BEFORE for patient in own) for own in seen])
    return known, blind, best, years


# ---------------------------------------------------------------------------------------------------- the page
def document(runs: int, quick: bool = False) -> str:
    """Return the page."""
    with TemporaryDirectory() as place:
        release = released(Path(place), *((1, 8) if quick else (10, 64)))
        pools = [
            pool_of(release, site, *((240, 100) if quick else (1500, 200))) for site in SITES[: 2 if quick else None]
        ]
    known, blind, best, years = run(pools, runs)
    right = np.mean([pool.usual[:, pool.names.index(OUTCOME)].mean() for pool in pools])
    missed = [case for case, found in known.items() if case[0] != "none" and found.share < WANTED]
    never = [case for case in missed if case in best and np.mean(best[case], 0)[0] < WANTED]
    hardly = [
        case for case in missed if case in best and np.mean(best[case], 0)[0] >= WANTED > np.mean(best[case], 0)[1]
    ]
    sure = 1.96 * np.std(years) / len(years) ** 0.5
    return f"""# Changes at a hospital, and when they are seen

Written by `python -m benchmarks.monitor --runs {runs} --write`. What is watched and how is in [after.md](../after.md).

One of eight hospitals changes (SYNTHETIC histology, two classes; each hospital has a look of its own; the model of
FedAvg is right in {right:.0%} of cases). The charts rest on {REFERENCE} patients of its validation and are set for one
false alarm in a year of {A_YEAR:,} patients. {BEFORE} patients come before the change. Found: an alarm within the next
{WITHIN}. {runs} runs each, with other patients, two for each reference.
Outcomes are known at once, or never ("without outcomes").

The oracle is the best that is possible at all (Moustakides 1986): it knows how patients were before and how they are
after this change, and spends the whole year's false alarm on it; in brackets, the share of it that each of our charts
has. It adds up log likelihood ratios of known classes, and for wrong labels of classes given all numbers that are kept.
Its limits come from other years than those of this page.

Without a change there were **{np.mean(years):.2f} ± {sure:.2f} alarms a year** (95 % interval over runs), and none in
{np.mean(np.array(years) == 0):.0%} of the years.

| change | size | found | oracle | without outcomes | patients until the alarm (median) | first seen by |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(_rows(known, blind, best))}

{chr(10).join(f"- {kind}: {what}" for kind, (what, _) in CHANGES.items())}

Wanted: found in {WANTED:.0%} of runs. Missed: {_listed(missed)}.
**No chart can find these in {WITHIN} patients**, not even one that knows the change: {_listed(never)}.
Found only by one that knows the change and looks for nothing else: {_listed(hardly)}.

Label noise changes nothing that is seen without outcomes: alarms there are by chance, as without a change. With
outcomes it is seen by the model's errors, so later where the model is right less often.
"""


def _listed(cases: list[Case]) -> str:
    return "; ".join(f"{kind}, {size}" for kind, size in cases) or "none"


def _rows(known: dict[Case, Found], blind: dict[Case, Found], best: dict[Case, list[list[bool]]]) -> Iterator[str]:
    for (kind, size), found in known.items():
        told = [alarm for alarm in found.alarms if alarm]
        names = [alarm.name for alarm in told]
        first = max(sorted(set(names)), key=names.count) if names else "–"
        late = [BLOCK * (alarm.block + 1) - BEFORE for alarm in told]
        middle = f"{np.median(late):.0f}" if late else "–"
        able = "{:.1%} ({:.1%})".format(*np.mean(best[kind, size], 0)) if (kind, size) in best else "–"
        yield f"| {kind} | {size} | {found.share:.1%} | {able} | {blind[kind, size].share:.1%} | {middle} | {first} |"


def main(arguments: list[str] | None = None) -> int:
    """Make the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor", description="Changes at a hospital.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="write docs/results/monitor.md")
    parser.add_argument("--quick", action="store_true", help="eight runs of a model that has hardly learned")
    chosen = parser.parse_args(arguments)
    text = document(8 if chosen.quick else chosen.runs, chosen.quick)
    if chosen.write:
        DOCUMENT.write_text(text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
