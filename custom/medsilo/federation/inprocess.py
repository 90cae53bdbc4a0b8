"""A study in one process, without NVFlare: the reference that every NVFlare run must equal."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_text
from medsilo.federation.centralised import POOL, Pool, spread_over_hospitals
from medsilo.federation.channel import Missing, Outgoing, Receive
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.limits import Clock
from medsilo.federation.participant import Participant
from medsilo.federation.permission import Permission
from medsilo.federation.protection import acquire_lock
from medsilo.federation.site_context import Site, SiteContext
from medsilo.federation.site_stack import TrainingSite, training_site
from medsilo.plan import Plan
from medsilo.runs.messages import StudyMessage
from medsilo.runs.paths import PLAN, site_folder
from medsilo.runs.record import Record
from medsilo.runs.rounds import Round
from medsilo.site.settings import SiteSettings

COPIES = 3  # of a site's parameters: values, gradients, what an optimizer remembers
AWAKE = 1 << 30  # bytes of networks up to which all sites keep theirs in memory between their answers
OnRound = Callable[[Round], None]


class Line:
    """The channel to sites in this process, which answer one after the other, in sorted order."""

    def __init__(self, participants: Mapping[str, Site]) -> None:
        self.participants = participants

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        missing = {}
        for site in sites:
            if site not in self.participants:
                missing[site] = Missing("lost", "its data are not here")
                continue
            try:
                receive(site, self.answer(site, outgoing(site)))
            except MedsiloError as error:
                missing[site] = Missing.refused(error)
        return missing

    def answer(self, site: str, parcel: StudyMessage) -> StudyMessage:
        """Let a site answer."""
        return self.participants[site].answer(parcel, lambda: None)

    def pause(self, seconds: float) -> None:
        """Nothing comes back in one process by waiting."""


class Loop(Line):
    """The transport of one process."""

    participants: Mapping[str, TrainingSite]

    def __init__(self, participants: Mapping[str, TrainingSite], rests: bool = False) -> None:
        """rests: between its answers a site holds no networks; the folders have what it needs."""
        super().__init__(participants)
        self.rests = rests
        self.clocks = {site: Clock() for site in participants}

    def answer(self, site: str, parcel: StudyMessage) -> StudyMessage:
        try:
            with self.clocks[site].running():
                return self.participants[site].answer(parcel, self.clocks[site].check)
        finally:
            if self.rests:
                self.participants[site].offload()


def run(
    plan: Plan,
    *,
    folder: Path,
    resume: bool = False,
    settings: SiteSettings | None = None,
    on_round: OnRound = lambda line: None,
    kind: Callable[..., Participant] = Participant,
) -> Record:
    """Run a plan over its sites; returns the record of a run that finished.

    resume: goes on from the folder's last checkpoint. kind: makes each site, to watch it.
    """
    plan, record, settings = plan.on_one_machine, Record(folder), settings or SiteSettings()
    settings.check_sites(plan.participation.everyone)
    if plan.algorithm.pooled:
        _run_central(plan, record, resume, settings, on_round)
    else:
        _run_federated(plan, record, resume, settings, on_round, kind)
    return record


def _run_federated(
    plan: Plan,
    record: Record,
    resume: bool,
    settings: SiteSettings,
    on_round: OnRound,
    kind: Callable[..., Participant],
) -> None:
    names = plan.participation.everyone
    with ExitStack() as places:
        for site in names:
            places.callback(acquire_lock(plan, site, settings.of(site), site_folder(record.folder, site)))
        rests = 4 * COPIES * plan.parameters * len(names) > AWAKE
        participants = _participants(plan, record.folder, settings, kind, rests)
        for own in (
            participants.values()
        ):  # a site and what it works with refer to each other, so its networks would stay for a while
            places.callback(own.offload)
        transport = Loop(participants, rests)
        sites = plan.participation.sites
        Coordinator(plan, sites, transport, record, "in-process", on_round, settings).run(resume)


def _run_central(plan: Plan, record: Record, resume: bool, settings: SiteSettings, on_round: OnRound) -> None:
    if resume:
        raise MedsiloError("central training can't be resumed; run it again in a new folder")
    root = record.folder
    hospitals = {site: own.participant for site, own in _participants(plan, root, settings, Participant).items()}
    pool = Pool(SiteContext(plan, POOL, [POOL], settings, site_folder(root, POOL)), hospitals)
    alone = plan.with_changes([f"participation.sites=[{POOL}]", "participation.minimum=null"])
    coordinator = Coordinator(alone, [POOL], Loop({POOL: TrainingSite(pool)}), record, "in-process", on_round)
    record.write_summary(spread_over_hospitals(pool, coordinator.run(), plan))
    write_text(root / PLAN, plan.to_yaml())  # of the hospitals, as the summary and the model's file have it


def _participants(
    plan: Plan, root: Path, settings: SiteSettings, kind: Callable[..., Participant], rests: bool = False
) -> dict[str, TrainingSite]:
    names = plan.participation.everyone
    participants = {}
    for site in names:
        place = SiteContext(plan, site, names, settings.of(site), site_folder(root, site))
        Permission(place).check()
        participants[site] = training_site(place, kind)
        if rests:
            participants[site].offload()
    return participants
