"""A hospital's kit with what belongs to it, read without what trains: `medsilo approve` and `ledger` answer at once."""

from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

from medsilo.check.kit import Kit, read_kit
from medsilo.core.errors import MedsiloError
from medsilo.core.package import ALWAYS, OURS, canonical, facts_of, is_here, is_installed, is_ours
from medsilo.runs.paths import HOSPITAL
from medsilo.site.approvals import Approvals, AskingPlan, PlanCode, approvals_of
from medsilo.site.kit import KitFiles
from medsilo.site.ledger import Ledger, ledger_of
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings

if TYPE_CHECKING:
    from medsilo.plan import Plan

ATTACHING = "medsilo."  # begins the groups of entry points that attach something to the engine


@dataclass(frozen=True)
class KitAtHome:
    """A hospital's kit with what belongs to it: its settings, its memory and its approvals."""

    kit: Kit
    local: Path
    settings: SiteSettings
    book: QueryBudget
    approvals: Approvals

    @classmethod
    def read(cls, folder: Path) -> "KitAtHome":
        """Read a kit; raises MedsiloError where it is none of a hospital's."""
        kit, local = read_kit(folder, "hospital"), folder / "local"
        files = files_of(kit)
        settings = SiteSettings.read(local)
        book = book_of_kit(settings, local, kit.name)
        assert book
        return cls(kit, local, settings, book, approvals_of(book, files, settings))

    @property
    def files(self) -> KitFiles:
        """The files that the kit signs with."""
        return files_of(self.kit)

    def ledger(self, data: str) -> Ledger:
        """Return the ledger of a data set, as the kit's key signs it."""
        return ledger_of(self.book, data, self.files)

    @property
    def output(self) -> Path:
        """The folder of this hospital's studies."""
        return self.settings.output or self.local.parent / "medsilo"

    def plan_of(self, asked: AskingPlan) -> "Plan":
        """Return the plan that asked; raises MedsiloError unless it has the hash that it is kept under."""
        from medsilo.plan import parse_plan

        plan = parse_plan(asked.plan, allowed=self.settings.packages)
        if plan.hash != asked.hash:
            raise MedsiloError("the stored plan is not the one that asked: its hash differs")
        return plan

    def code_of(self, asked: AskingPlan | None) -> PlanCode:
        """Return the packages that run a plan; of a plan that is not here yet, all that may."""
        if asked:
            return self.plan_of(asked).code
        allowed = filter(is_installed, map(canonical, self.settings.packages))
        return {name: facts_of(name) for name in sorted({*attached(), *allowed})}


def attached() -> set[str]:
    """Return the packages of ours that an entry point attaches to the engine here, and those that always run."""
    entries = (entry for one in filter(is_installed, OURS) for entry in distribution(one).entry_points)
    found = {entry.module.partition(".")[0] for entry in entries if entry.group.startswith(ATTACHING)}
    return {*filter(is_here, (*filter(is_ours, found), *ALWAYS))}


def files_of(kit: Kit) -> KitFiles:
    """Return what a kit signs with."""
    return KitFiles(*(str(kit.folder / name) for name in (kit.certificate, kit.key, kit.root)))


def book_of_kit(settings: SiteSettings, local: Path | None, site: str) -> QueryBudget | None:
    """Return what the site of a kit remembers; None where no settings say where that is."""
    output = settings.output or (local.parent / "medsilo" if local else None)
    records = settings.state_dir or (output / HOSPITAL if output else None)
    return QueryBudget(records / site) if records else None
