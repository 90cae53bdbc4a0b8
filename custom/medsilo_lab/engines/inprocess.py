"""Run a study in one process, without NVFlare. A run of the same study with NVFlare must give the same models and
scores as the run in one process.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from medsilo.core.errors import DataError, MedsiloError, Refused
from medsilo.core.files import write_text
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.limits import Clock
from medsilo.federation.participant import Participant, participant_of
from medsilo.federation.permission import Permission
from medsilo.federation.protection import acquire_lock
from medsilo.federation.site_context import Site, SiteContext
from medsilo.federation.site_stack import TrainingSite, training_site
from medsilo.plan import Plan
from medsilo.runs.messages import StudyMessage
from medsilo.runs.paths import PLAN, site_folder
from medsilo.runs.rounds import Round
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines.centralised import POOL, Pool, spread_over_hospitals
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record

# number of tensors per parameter at a site: the parameter, its gradient and the state of the optimizer
COPIES = 3
AWAKE = 1 << 30  # maximum total size, in bytes, of all sites' networks that stay in memory
OnRound = Callable[[Round], None]


class Line:
    """Sends requests to sites in the same process. The sites answer one after the other in the order of their names."""

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
                missing[site] = replace(Missing.refused(error), error=error)
        return missing

    def answer(self, site: str, message: StudyMessage) -> StudyMessage:
        return self.participants[site].answer(message, lambda: None)

    def pause(self, seconds: float) -> None:
        """Return immediately, because no site in this process can be late."""


class Loop(Line):
    participants: Mapping[str, TrainingSite]

    def __init__(self, participants: Mapping[str, TrainingSite], rests: bool = False) -> None:
        """rests: True to save memory: each site then writes its networks into a file between two answers."""
        super().__init__(participants)
        self.rests = rests
        self.clocks = {site: Clock() for site in participants}

    def answer(self, site: str, message: StudyMessage) -> StudyMessage:
        try:
            with self.clocks[site].running():
                return self.participants[site].answer(message, self.clocks[site].check)
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
    kind: Callable[..., Participant] = participant_of,
) -> Record:
    """Run a plan with all its sites, and return the record of the finished run.

    Args:
        resume: True to continue from the last checkpoint in the folder.
        kind: A function that creates each site. Tests may pass a function that creates a subclass.
    """
    plan, record, settings = plan.on_one_machine, Record(folder), settings or SiteSettings()
    settings.check_sites(plan.participation.everyone, plan.task.deals)
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
        for (
            participant
            # a site and its objects refer to each other, so Python would not free their memory immediately
        ) in participants.values():
            places.callback(participant.offload)
        transport = Loop(participants, rests)
        sites = plan.participation.sites
        Coordinator(plan, sites, transport, record, "in-process", on_round, settings).run(resume)


def _run_central(plan: Plan, record: Record, resume: bool, settings: SiteSettings, on_round: OnRound) -> None:
    if resume:
        raise MedsiloError("central training can't be resumed; run it again in a new folder")
    root = record.folder
    hospitals = {site: own.participant for site, own in _participants(plan, root, settings, participant_of).items()}
    pool = Pool(SiteContext(plan, POOL, [POOL], settings, site_folder(root, POOL)), hospitals)
    alone = plan.with_changes([f"participation.sites=[{POOL}]", "participation.minimum=null"])
    coordinator = Coordinator(alone, [POOL], Loop({POOL: TrainingSite(pool)}), record, "in-process", on_round)
    record.write_summary(spread_over_hospitals(pool, coordinator.run(), plan))
    # the plan, the summary and the model file all name the hospitals as sites
    write_text(root / PLAN, plan.to_yaml())


def _participants(
    plan: Plan, root: Path, settings: SiteSettings, kind: Callable[..., Participant], rests: bool = False
) -> dict[str, TrainingSite]:
    names = plan.participation.everyone
    participants = {}
    for site in names:
        place = SiteContext(plan, site, names, settings.of(site), site_folder(root, site))
        try:
            Permission(place).check()
            participants[site] = training_site(place, kind)
        # the message may contain the name of the site, because all sites are on this machine
        except (DataError, Refused) as error:
            error.args = (f"{site}: {error}",)
            raise
        if rests:
            participants[site].offload()
    return participants
