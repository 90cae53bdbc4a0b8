"""Facts that an adviser may use: the records of short runs, and nothing that hospitals don't tell.

A measuring study is a few ordinary runs of one plan. Their records hold, of each hospital, cases, class counts and
losses on its validation cases, each only where the hospital's own limits let it leave. Test scores are never read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.schema import Round, Summary

ALONE, TOGETHER = "local", "fedavg"
PROBES = (ALONE, TOGETHER, "fedbn", "fedper", "ditto", "fine-tuning", "adafed")  # one of each family, none dear
NEEDED = (ALONE, TOGETHER)
LEAST = 2  # rounds: a hospital tells the loss of the model that arrives, in the first round the untrained one


@dataclass(frozen=True)
class MeasuredHospital:
    """One hospital's part in the measuring runs; a value that it does not tell is None."""

    train: int | None
    validation: int | None
    losses: Mapping[str, float]  # the least on its validation cases, of each measuring run that told some
    untrained: float | None = None  # the loss before the first round


@dataclass(frozen=True)
class Probe:
    """The record of one measuring run: its outcome, and those of its rounds that count."""

    summary: Summary
    lines: Sequence[Round]


@dataclass(frozen=True)
class Measurement:
    """A measuring study and its hospitals."""

    rounds: int  # that every run had
    hospitals: Mapping[str, MeasuredHospital]

    @property
    def fallen_to(self) -> float | None:
        """Return the share of the untrained model's loss that the mean's still is."""
        start, end = [own.untrained for own in self.telling if own.untrained], self.losses(TOGETHER)
        return sum(end) / sum(start) if end and len(start) == len(end) else None

    def losses(self, method: str) -> list[float] | None:
        """Return a measuring run's losses at these hospitals; None without them."""
        told = [own.losses[method] for own in self.telling if method in own.losses]
        return told if told and len(told) == len(self.telling) else None

    @property
    def telling(self) -> list[MeasuredHospital]:
        """The hospitals that told a loss of the runs that are needed."""
        return [own for own in self.hospitals.values() if set(own.losses) >= set(NEEDED)]


def read_measured(runs: Sequence[Path], rounds: int | None = None) -> Measurement:
    """Read the records of finished runs of one plan, one for each method; others than PROBES are passed over.

    rounds: how many count, where the runs are longer than a measuring study.
    """
    found: dict[str, tuple[Path, Summary]] = {}
    for run in runs:
        summary = read_summary(run)
        if summary.method not in PROBES:
            continue
        if summary.method in found:
            raise MedsiloError(f"two runs are of {summary.method}; give one run of each method")
        _check(run, summary, next((one for _, one in found.values()), summary))
        found[summary.method] = run, summary
    if lacking := [name for name in NEEDED if name not in found]:
        raise MedsiloError(f"no finished run of {' and '.join(lacking)} is among these; run it, or give --measure JOB")
    least = min(summary.rounds.done for _, summary in found.values())
    rounds = least if rounds is None else min(rounds, least)
    check_rounds(rounds)
    of = {method: Probe(summary, read_rounds(run)[:rounds]) for method, (run, summary) in found.items()}
    together = of[TOGETHER]
    hospitals = {site: _hospital(site, of) for site in together.summary.sites}
    return Measurement(rounds, hospitals)


def check_rounds(rounds: int) -> None:
    """Raise where so many rounds would tell nothing."""
    if rounds < LEAST:
        raise MedsiloError(f"a measuring run needs {LEAST} rounds at least, and here are {rounds}; give more rounds")


def _check(run: Path, summary: Summary, first: Summary) -> None:
    """Raise unless a run ended well and is of the same plan as the first."""
    if not summary.finished:
        raise MedsiloError(f"run '{run.name}' failed: {summary.reason or 'no reason given'}; repeat it")
    for what in ("task", "network", "metric", "seed"):
        if getattr(summary, what) != getattr(first, what):
            raise MedsiloError(f"run '{run.name}' has another {what} than the first; give runs of one plan")
    if set(summary.sites) != set(first.sites):
        raise MedsiloError(f"run '{run.name}' has other hospitals than the first; give runs of one plan")


def _hospital(site: str, probes: Mapping[str, Probe]) -> MeasuredHospital:
    cases = probes[TOGETHER].summary.sites[site].cases or {}
    losses, untrained = {}, None
    for method, probe in probes.items():
        told = [line.sites[site].validation_loss for line in probe.lines if site in line.sites]
        if known := [loss for loss in told if loss is not None]:
            losses[method] = min(known)
            if method == TOGETHER:
                untrained = told[0]
    return MeasuredHospital(cases.get("train"), cases.get("validation"), losses, untrained)
