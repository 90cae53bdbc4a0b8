"""Read a hospital's kit, together with the settings and records of the hospital.

To keep `medsilo approve` and `medsilo ledger` fast, this module imports no training code.
"""

from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

from medsilo.check.kit import Kit, read_kit
from medsilo.core.errors import MedsiloError
from medsilo.core.package import ALWAYS, OURS, canonical, facts_of, is_here, is_installed, is_ours
from medsilo.runs.paths import HOSPITAL
from medsilo.site.accepted_settings import AcceptedSettings
from medsilo.site.approvals import Approvals, AskingPlan, PlanCode, approvals_of
from medsilo.site.kit import KitFiles
from medsilo.site.ledger import Ledger, ledger_of
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings

if TYPE_CHECKING:
    from medsilo.plan import Plan

ATTACHING = "medsilo."  # prefix of the entry-point groups for extensions of the engine


@dataclass(frozen=True)
class KitAtHome:
    kit: Kit
    local: Path
    settings: SiteSettings
    budget: QueryBudget
    approvals: Approvals

    @classmethod
    def read(cls, folder: Path) -> "KitAtHome":
        kit, local = read_kit(folder, "hospital"), folder / "local"
        files = files_of(kit)
        settings = SiteSettings.read(local)
        budget = budget_of_kit(settings, local, kit.name)
        assert budget
        return cls(kit, local, settings, budget, approvals_of(budget, files, settings))

    @property
    def files(self) -> KitFiles:
        return files_of(self.kit)

    @property
    def accepted(self) -> AcceptedSettings:
        """Return the record of the settings that the hospital's engineer accepted."""
        return AcceptedSettings(self.files, self.budget.folder)

    def ledger(self, data: str) -> Ledger:
        return ledger_of(self.budget, data, self.files)

    @property
    def output(self) -> Path:
        return self.settings.studies_in(self.local.parent)

    def plan_of(self, pending: AskingPlan) -> "Plan":
        from medsilo.plan import parse_plan

        plan = parse_plan(pending.plan, allowed=self.settings.packages)
        if plan.hash != pending.hash:
            raise MedsiloError("the stored plan is not the submitted plan: the hashes differ")
        return plan

    def code_of(self, pending: AskingPlan | None) -> PlanCode:
        """Return the packages that a submitted plan uses, or, without a plan, all packages that a plan may use here."""
        if pending:
            return self.plan_of(pending).code
        allowed = filter(is_installed, map(canonical, self.settings.packages))
        return {name: facts_of(name) for name in sorted({*attached(), *allowed})}


def attached() -> set[str]:
    """Return the installed medsilo packages that run in every study: the packages in `ALWAYS`, and those whose entry
    points extend the engine.
    """
    entries = (entry for one in filter(is_installed, OURS) for entry in distribution(one).entry_points)
    found = {entry.module.partition(".")[0] for entry in entries if entry.group.startswith(ATTACHING)}
    return {*filter(is_here, (*filter(is_ours, found), *ALWAYS))}


def files_of(kit: Kit) -> KitFiles:
    return KitFiles(*(str(kit.folder / name) for name in (kit.certificate, kit.key, kit.root)))


def budget_of_kit(settings: SiteSettings, local: Path | None, site: str) -> QueryBudget | None:
    """Return the query budget of a kit's site, or None if the settings name no folder for the budget."""
    output = settings.studies_in(local.parent) if local else settings.output
    records = settings.state_dir or (output / HOSPITAL if output else None)
    return QueryBudget(records / site) if records else None
