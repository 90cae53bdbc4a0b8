"""Promises at hospitals: 1,000 drawn federations, and four real sets of data.

    python -m benchmarks.promise [--federations N] [--seed N] [--data DIR] [--runs DIR] [--write]

Prints docs/results/promise.md, which --write writes. DATA holds the real sets; a set whose run lies under RUNS is not
trained again, and one that is not there is left out. About a quarter of an hour on a free core.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results.har import write_windows
from medsilo_promise.shrinking import Values, bound, others, smallest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "results" / "promise.md"
LEVEL, CONFIDENCE, LABELS = 0.9, 0.9, 4
CUTS = np.concatenate([np.logspace(0, -4, 95), [0.0]])
MANY = 4000  # cases by which a hospital's true risk is known
RULES = ("shrunk", "pooled", "local")
LOOKS, NOISES, LABEL_SHIFTS = (0.0, 0.3, 0.8), (0.0, 0.3, 0.6), (100.0, 5.0, 1.0)


@dataclass(frozen=True)
class Hospital:
    """A drawn hospital: validation cases, and what is true of it."""

    cases: int
    lost: Values  # of these cases, at each cut
    risk: Values  # of its patients
    size: Values  # of their sets


@dataclass(frozen=True)
class Outcome:
    """A rule's result at a hospital."""

    hospitals: int  # of its federation
    cases: int
    shift: str
    promised: bool
    kept: bool
    size: float  # against that of the smallest cut that keeps the level


def federation(draw: np.random.Generator, many: int = MANY) -> tuple[str, list[Hospital]]:
    """Draw a federation: hospitals differ in shares of labels, in look (scores shifted) and in noise (how good the
    model is)."""
    look, noise, alike = draw.choice(LOOKS), draw.choice(NOISES), draw.choice(LABEL_SHIFTS)
    shifts = [name for name, on in (("look", look), ("noise", noise), ("label", alike < 100)) if on]
    hospitals = []
    for _ in range(draw.integers(3, 21)):
        shares, signal = draw.dirichlet([alike] * LABELS), 3 * np.exp(draw.normal(0, noise))
        look_here = draw.normal(0, look, LABELS)
        count = int(np.exp(draw.uniform(np.log(5), np.log(501))))
        lost, _ = _answers(draw, count, shares, signal, look_here)
        risk, size = _answers(draw, many, shares, signal, look_here)
        hospitals.append(Hospital(count, lost, risk / many, size / many))
    return "+".join(shifts) or "none", hospitals


def _answers(
    draw: np.random.Generator, count: int, shares: Values, signal: float, look: Values
) -> tuple[Values, Values]:
    """Return how many of so many cases are missed at each cut, and how many labels their sets have together."""
    label = draw.choice(LABELS, size=count, p=shares)
    scores = draw.normal(0, 1.5, (count, LABELS)) + look
    scores[np.arange(count), label] += signal
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    own = np.where(chances.argmax(1) == label, 1.0, chances[np.arange(count), label])
    sizes = np.maximum((chances[:, :, None] >= CUTS).sum(1), 1)
    return (own[:, None] < CUTS).sum(0).astype(np.float64), sizes.sum(0).astype(np.float64)


def outcomes(
    count: int, seed: int, confidence: float | None = CONFIDENCE, many: int = MANY
) -> dict[str, list[Outcome]]:
    """Return what each rule does at every hospital of so many federations."""
    draw, found = np.random.default_rng(seed), {rule: list[Outcome]() for rule in RULES}
    allowed, nothing = round(1 - LEVEL, 6), np.zeros(len(CUTS))
    for _ in range(count):
        shift, hospitals = federation(draw, many)
        lost = np.array([one.lost for one in hospitals])
        cases = np.array([one.cases for one in hospitals], dtype=np.float64)
        strengths, means = others(lost, cases, allowed)
        pooled = smallest(bound(lost.sum(0), float(cases.sum()), nothing, nothing, confidence), allowed)
        for own, strength, mean in zip(hospitals, strengths, means, strict=False):
            best = own.size[np.flatnonzero(own.risk <= allowed)[0]]
            shrunk = bound(own.lost, own.cases, strength * mean, strength * (1 - mean), confidence)
            local = bound(own.lost, own.cases, nothing, nothing, confidence)
            cuts = {"shrunk": smallest(shrunk, allowed), "pooled": pooled, "local": smallest(local, allowed)}
            for rule, cut in cuts.items():
                at = len(CUTS) - 1 if cut is None else cut
                kept, size = bool(own.risk[at] <= allowed), float(own.size[at] / best)
                found[rule].append(Outcome(len(hospitals), own.cases, shift, cut is not None, kept, size))
    return found


# ---------------------------------------------------------------------------------------------------- real data
@dataclass(frozen=True)
class Real:
    """A real set, and the short training that its models come from."""

    title: str
    arguments: tuple[str, ...]
    prepare: Callable[[Path, Path], tuple[str, ...]]  # data and a folder of one's own → more arguments


def _hearts(data: Path, place: Path) -> tuple[str, ...]:
    """Write each hospital's file as a table, of which a number from the file's place deals parts."""
    names = ("age", "sex", "pain", "pressure", "cholesterol", "sugar", "ecg", "rate", "angina", "peak")
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        lines = (data / "heart_uci" / f"processed.{hospital}.data").read_text("utf-8").split()
        folder = place / hospital
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "patients.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*names, "outcome", "part"])
            for number, line in enumerate(lines):
                cells = line.split(",")
                part = ("train", "test", "validation", "train", "test")[number % 5]
                sick = "yes" if float(cells[-1]) > 0 else "no"
                writer.writerow(["" if cell == "?" else cell for cell in cells[:10]] + [sick, part])
        settings = f"public_data: true\ndata: {{folder: {folder}, table: patients.csv, columns: {{part: part}}}}\n"
        (folder / "medsilo.yaml").write_text(settings, "utf-8")
    columns = ["age", "{name: sex, levels: ['0.0', '1.0']}", *names[2:]]
    return (
        *("--set", f"task.columns=[{', '.join(columns)}]", "--set", "task.target=outcome"),
        *("--set", "participation.sites=[cleveland, hungarian, switzerland, va]", "--settings", str(place)),
    )


def _people(data: Path, place: Path) -> tuple[str, ...]:
    people = ", ".join(f"subject_{number:02d}" for number in range(1, 21))
    return ("--set", f"participation.sites=[{people}]", "--data", str(write_windows(data / "har_uci", place, None)))


def _tiles(data: Path, place: Path) -> tuple[str, ...]:
    return ("--data", str(data / "nuclei_he"))


def _volumes(data: Path, place: Path) -> tuple[str, ...]:
    """Deal the volumes of the one centre to four hospitals of 20, 40, 80 and 120, in the order of their names."""
    names = sorted(path.name for path in (data / "hippocampus" / "images").glob("*.nii.gz"))
    sites, first = dict(zip(("h20", "h40", "h80", "h120"), (20, 40, 80, 120), strict=True)), 0
    for site, count in sites.items():
        for kind in ("images", "labels"):
            folder = place / site / "data" / kind
            folder.mkdir(parents=True, exist_ok=True)
            for name in names[first : first + count]:
                (folder / name).write_bytes((data / "hippocampus" / kind / name).read_bytes())
        first += count
        text = (
            f"public_data: true\ndata: {{folder: {place / site / 'data'}, images: images/*.nii.gz, "
            "labels: labels/*.nii.gz, shares: [0.2, 0.5, 0.3]}\n"
        )
        (place / site / "medsilo.yaml").write_text(text, "utf-8")
    return ("--set", f"participation.sites=[{', '.join(sites)}]", "--settings", str(place))


def _set(*changes: str) -> tuple[str, ...]:
    return tuple(part for change in changes for part in ("--set", change))


TABLE = ("jobs/fedavg", "--plan", "jobs/fedavg/plans/table.yaml")
UNET = (
    "network.features=[8, 16]",
    "tracking.validate_every=4",
    "task.augmentation=[]",
    "training.batch_size=4",
    "training.learning_rate=0.005",
)
REAL = {
    "heart": Real(
        "Heart disease, four hospitals (heart_uci): a set of two labels holds the true one",
        (*TABLE, *_set("training.rounds=20")),
        _hearts,
    ),
    "heart-finding": Real(
        "Heart disease again, sensitivity",
        (*TABLE, *_set("training.rounds=20")),
        _hearts,
    ),
    "har": Real(
        "Activities by person (har_uci), 20 people, each a site: a set of six labels holds the true one",
        ("jobs/fedbn", *_set("task.name=activity-windows", "training.rounds=6")),
        _people,
    ),
    "nuclei": Real(
        "Nuclei in three sets of tiles (nuclei_he): share of the nuclei's area that is missed, by patient",
        (
            *("jobs/fedavg", "--plan", "jobs/harmofl/plans/nuclei-small.yaml"),
            *_set("training.rounds=10", "network.features=[8, 16, 32]"),
        ),
        _tiles,
    ),
    "hippocampus": Real(
        "Anterior hippocampus, one centre dealt to four hospitals: share of its volume that is missed",
        (
            *("jobs/fedavg", "--plan", "jobs/fedavg/plans/nifti-folder.yaml"),
            *_set(
                "task.labels=[anterior, posterior]",
                "task.modalities=[mr]",
                "task.size=[32, 48, 32]",
                "task.target_spacing=null",
                "task.intensity={kind: z-score}",
                "training.rounds=24",
                "training.local_epochs=1",
                *UNET,
            ),
        ),
        _volumes,
    ),
}


def run_of(name: str, data: Path, runs: Path) -> dict[str, Any]:
    """Return what a real set's run tells of its promise; trains it where no run is there."""
    one, summary = REAL[name], runs / name / "summary.json"
    if not summary.is_file():
        of = "finding" if name.endswith("finding") else "null"
        promise = _set(f"layers=[{{name: promise, level: {LEVEL}, confidence: {CONFIDENCE}, of: {of}}}]")
        more = one.prepare(data, runs / "data" / name)
        command = [sys.executable, "-m", "medsilo.cli", "run", *one.arguments, *promise, *more]
        told = ["--engine", "inprocess", "--out", str(runs), "--name", name]
        done = subprocess.run([*command, *told], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    details: dict[str, Any] = json.loads(summary.read_text("utf-8"))["details"]["promise"]
    return details


# ---------------------------------------------------------------------------------------------------- the page
def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row_of(label: str, found: list[Outcome]) -> list[str]:
    """Return a row: share of hospitals at which a promise is kept, is made, and how large answers are."""
    if not found:
        return [label, "0", *["–"] * 5]
    kept = np.array([one.kept for one in found])
    made = [one for one in found if one.promised]
    spread = 1.96 * np.sqrt(kept.mean() * (1 - kept.mean()) / len(found))
    held = f"{100 * np.mean([one.kept for one in made]):.1f} %" if made else "–"
    size = f"{np.mean([one.size for one in made]):.2f}" if made else "–"
    return [
        label,
        f"{len(found):,}",
        f"{100 * kept.mean():.1f} ± {100 * spread:.1f} %",
        f"{100 * len(made) / len(found):.1f} %",
        held,
        f"{np.mean([one.size for one in found]):.2f}",
        size,
    ]


HEADS = ("", "hospitals", "kept", "promise made", "kept where made", "size against the oracle's", "size where made")


def simulated(found: Mapping[str, list[Outcome]]) -> str:
    """Return the tables of drawn federations."""
    shrunk = found["shrunk"]
    parts = {
        "hospitals with 5 to 21 cases": [one for one in shrunk if one.cases < 22],
        "22 to 99 cases": [one for one in shrunk if 22 <= one.cases < 100],
        "100 to 500 cases": [one for one in shrunk if one.cases >= 100],
        "federations of 3 (no shrinkage)": [one for one in shrunk if one.hospitals == 3],
        "federations of 4 to 7": [one for one in shrunk if 4 <= one.hospitals < 8],
        "federations of 8 to 20": [one for one in shrunk if one.hospitals >= 8],
        **{f"shift: {name}": [o for o in shrunk if o.shift == name] for name in sorted({o.shift for o in shrunk})},
    }
    return (
        _table(HEADS, [row_of(rule, found[rule]) for rule in RULES])
        + "\n\nThe shrunk rule, by hospital and by what differs:\n\n"
        + _table(HEADS, [row_of(label, own) for label, own in parts.items()])
    )


def real(name: str, told: Mapping[str, Any]) -> str:
    """Return a real set's table."""
    rows = []
    for site, groups in sorted(told["sites"].items()):
        own = groups["all"]
        cells = [site, str(own["calibrated"]), str(own["patients"])]
        for rule in RULES:
            one = own["rules"][rule]
            cells.append(f"{one['lost']:.3f} ({one['size']:.2f})" if one["promised"] else "no promise")
        rows.append(cells)
    errors = told["errors"].values()
    warmth = ""
    if errors:
        before, after = (float(np.mean([error[place] for error in errors])) for place in (0, 1))
        warmth = (
            f"\n\nCalibration error of the likeliest label, mean over sites: {before:.3f} before scaling by each "
            f"site's temperature, {after:.3f} after."
        )
    strength = told["strength"]["all"]
    return (
        f"### {REAL[name].title}\n\nPromised: at most {1 - told['level']:.2f} lost. Found at test cases: lost "
        f"({told['sized']}). κ = {strength:.1f}; a hospital alone needs {told['needed']} patients.\n\n"
        + _table(("site", "calibrated on", "tested on", *RULES), rows)
        + warmth
    )


def verdicts(found: Mapping[str, list[Outcome]]) -> str:
    """Return what was wanted, and whether it holds."""
    shrunk = found["shrunk"]
    kept, size = np.mean([one.kept for one in shrunk]), np.mean([one.size for one in shrunk])
    return (
        f"Wanted: kept at 90 % of hospitals: **{'holds' if kept >= 0.9 else 'does not hold'}** ({100 * kept:.1f} %). "
        f"Answers at most 1.5 times the oracle's: **{'holds' if size <= 1.5 else 'does not hold'}** ({size:.2f}, "
        "hospitals without a promise counted with all labels)."
    )


def document(count: int, seed: int, data: Path, runs: Path) -> str:
    """Return the page."""
    found, mean = outcomes(count, seed), outcomes(max(1, count // 5), seed + 1, None)
    sets = [real(name, run_of(name, data, runs)) for name in REAL if (data / _folder(name)).is_dir()]
    return f"""# Promises at hospitals, drawn and real

Written by `python -m benchmarks.promise --federations {count} --seed {seed} --write`. What is promised and how is in
[promise.md](../promise.md).

## {count:,} drawn federations

3 to 20 hospitals with 5 to 500 validation cases each (uniform on a logarithmic scale), {LABELS} labels. Hospitals
differ in shares of labels (Dirichlet of 100, 5 or 1), in look (scores of labels shifted by a normal number of
deviation 0, 0.3 or 0.8) and in noise (the model's signal times exp of a normal number of deviation 0, 0.3 or 0.6), in
all combinations.
Promised: the set holds the true label of {100 * LEVEL:.0f} % of patients, with confidence {CONFIDENCE}. Kept: the
hospital's true risk, from {MANY:,} other cases, is at most {1 - LEVEL:.2f}. The oracle's set is the smallest that
keeps it there. Where no promise can be made, the set has all labels. "±" is for hospitals as if each were drawn by
itself.

{verdicts(found)}

{simulated(found)}

Without confidence (`confidence: null`, {max(1, count // 5)} federations): the level holds on average over calibrations
and hospitals, not at each.

{_table(HEADS, [row_of(rule, mean[rule]) for rule in RULES])}

## Real data

From small trainings, one seed each: what is shown is the promise, not the best model. With few test cases the found
risk may be above the promised one by chance.

{chr(10).join(f"{one}{chr(10)}" for one in sets)}"""


def _folder(name: str) -> str:
    return {"heart": "heart_uci", "har": "har_uci", "nuclei": "nuclei_he"}.get(name.split("-")[0], name)


def main(arguments: list[str] | None = None) -> int:
    """Make the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promise", description="Promises at hospitals.")
    parser.add_argument("--federations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "promise", help="where real runs are kept")
    parser.add_argument("--write", action="store_true", help="write docs/results/promise.md")
    parser.add_argument("--quick", action="store_true", help="five drawn federations and no real data")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.federations, chosen.data = 5, ROOT / "none"
    text = document(chosen.federations, chosen.seed, chosen.data.resolve(), chosen.runs.resolve())
    if chosen.write:
        DOCUMENT.write_text(text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
