"""Create a study's sites for tests: participants that disclose scores, but have no ledger and no optional layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medsilo.federation.participant import Participant, participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite, codec_of
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import SiteData
from tests.conftest import SITES

CPU = SiteSettings(device="cpu")


def site_of(
    plan: Plan,
    site: str,
    sites: Sequence[str],
    settings: SiteSettings,
    folder: Path,
    data: SiteData | None = None,
    kind: Callable[..., Participant] = participant_of,
    **place: Any,
) -> TrainingSite:
    own = SiteContext(plan, site, sites, settings, folder, **place)
    return TrainingSite(kind(own, data, codec_of(own)))


def sites_of(
    plan: Plan, folder: Path, names: Sequence[str] = SITES, settings: SiteSettings = CPU
) -> dict[str, TrainingSite]:
    return {site: site_of(plan, site, names, settings, folder / "sites" / site) for site in names}


def with_settings(site: TrainingSite, **settings: Any) -> None:
    own, other = site.participant, SiteSettings(device="cpu", **settings)
    own.context = own.trainer.context = replace(own.context, settings=other)
    own.disclosure.settings, own.disclosure.least = other, other.least(own.context.plan.task.synthetic)
