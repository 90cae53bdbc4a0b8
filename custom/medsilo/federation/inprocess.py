"""A study in one process, without NVFlare: the reference that every NVFlare run must equal."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from torch import nn

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import load_tensors
from medsilo.federation.around import TrainingSite, training_site
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.limits import Clock
from medsilo.federation.participant import Participant
from medsilo.federation.permission import Permission
from medsilo.federation.pool import POOL, Pool, spread_over_hospitals
from medsilo.federation.protection import take_place
from medsilo.federation.seams import Line, Place
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Parcel
from medsilo.runs.paths import site_folder
from medsilo.runs.record import Record, new_study
from medsilo.runs.schema import Round, Summary
from medsilo.site.settings import SiteSettings

COPIES = 3  # of a site's parameters: values, gradients, what an optimizer remembers
AWAKE = 1 << 30  # bytes of networks up to which all sites keep theirs in memory between their answers
OnRound = Callable[[Round], None]


@dataclass(frozen=True)
class StudyResult:
    """A finished study."""

    plan: Plan
    root: Path
    history: list[Round]
    summary: Summary

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        """Every site's model after the last round, read from the sites' folders when it is first asked for."""
        pooled = self.plan.algorithm.pooled
        return {
            site: _last_model(self.plan, site_folder(self.root, POOL if pooled else site))
            for site in self.plan.participation.everyone
        }


class Loop(Line):
    """The transport of one process."""

    participants: Mapping[str, TrainingSite]

    def __init__(self, participants: Mapping[str, TrainingSite], rests: bool = False) -> None:
        """rests: between its answers a site holds no networks; the folders have what it needs."""
        super().__init__(participants)
        self.rests = rests
        self.clocks = {site: Clock(own.folder, own.settings.limits) for site, own in participants.items()}

    def answer(self, site: str, parcel: Parcel) -> Parcel:
        try:
            with self.clocks[site].running():
                return self.participants[site].answer(parcel, self.clocks[site].check)
        finally:
            if self.rests:
                self.participants[site].rest()


def run(
    plan: Plan,
    *,
    folder: Path | None = None,
    resume: bool = False,
    settings: SiteSettings | None = None,
    on_round: OnRound = lambda line: None,
    kind: Callable[..., Participant] = Participant,
) -> StudyResult:
    """Run a plan over its sites.

    With a `folder` the run tree is written there, and `resume` goes on from its last checkpoint. kind: makes each site,
    to watch it.
    """
    if not plan.participation.sites:
        raise MedsiloError("zero sites: name them in participation.sites")
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        root = folder or Path(str(place)) / new_study(plan)
        work = _run_central if plan.algorithm.pooled else partial(_run_federated, kind=kind)
        settings = settings or SiteSettings()
        settings.check_sites(plan.participation.everyone)
        run = work(plan, root, resume, settings, on_round)
        if not folder:
            _ = run.models  # before their folder goes
        return run


def _run_federated(
    plan: Plan,
    root: Path,
    resume: bool,
    settings: SiteSettings,
    on_round: OnRound,
    kind: Callable[..., Participant],
) -> StudyResult:
    names = plan.participation.everyone
    with ExitStack() as places:
        for site in names:
            places.callback(take_place(plan, site, settings.of(site), site_folder(root, site)))
        rests = 4 * COPIES * plan.parameters * len(names) > AWAKE
        participants = _participants(plan, root, settings, kind, rests)
        transport, sites = Loop(participants, rests), plan.participation.sites
        coordinator = Coordinator(plan, sites, transport, Record(root), "in-process", on_round, settings)
        summary = coordinator.run(resume)
    return StudyResult(plan, root, coordinator.rounds, summary)


def _run_central(plan: Plan, root: Path, resume: bool, settings: SiteSettings, on_round: OnRound) -> StudyResult:
    if resume:
        raise MedsiloError("central training can't be resumed; run it again in a new folder")
    hospitals = {site: own.participant for site, own in _participants(plan, root, settings, Participant).items()}
    pool = Pool(Place(plan, POOL, [POOL], settings, site_folder(root, POOL)), hospitals)
    record = Record(root)
    alone = plan.with_changes([f"participation.sites=[{POOL}]", "participation.minimum=null"])
    coordinator = Coordinator(alone, [POOL], Loop({POOL: TrainingSite(pool)}), record, "in-process", on_round)
    summary = spread_over_hospitals(pool, coordinator.run(), plan)
    record.write_summary(summary)
    return StudyResult(plan, root, coordinator.rounds, summary)


def _participants(
    plan: Plan, root: Path, settings: SiteSettings, kind: Callable[..., Participant], rests: bool = False
) -> dict[str, TrainingSite]:
    names = plan.participation.everyone
    participants = {}
    for site in names:
        place = Place(plan, site, names, settings.of(site), site_folder(root, site))
        Permission(place).check()
        participants[site] = training_site(place, kind)
        if rests:
            participants[site].rest()
    return participants


def _last_model(plan: Plan, folder: Path) -> nn.Module:
    model = plan.algorithm.whole(plan.build_networks())
    with reading(f"{paths.LAST} of a site"):
        model.load_state_dict(load_tensors(folder / paths.LAST)[0])
    return model
