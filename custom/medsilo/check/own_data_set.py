"""Describe a hospital's data set, and who accepted it, for persons at this hospital who decide about a plan."""

from collections.abc import Iterator
from typing import Any

from medsilo.check.result import Finding, Table
from medsilo.core.errors import MedsiloError
from medsilo.site.data_set import ACCEPTED, DataSet, check_accepted, check_unchanged
from medsilo.site.kit import KitFiles
from medsilo.site.settings import SiteSettings

WHERE, TITLE = "data", "This hospital's data set"
ACCEPT = "read it, then: medsilo data accept DATASET --by 'A. PERSON'"
MAKE = "medsilo data FOLDER -o DATASET, accept it, then write data: DATASET into medsilo.yaml"
CHECKS = {WHERE: "Somebody accepted the data set, whose files have not changed since"}


def data_set_words(settings: SiteSettings, kit: KitFiles | None = None) -> list[tuple[str, str]]:
    """Return pairs of a heading and a text about a hospital's data set and its acceptance; empty without a data set."""
    folder = settings.data.data_set if settings.data else None
    if folder is None:
        return []
    try:
        accepted = f"by {check_accepted(folder, _key(kit)).by}"
    except MedsiloError as error:
        accepted = f"no: {error}"
    return [*DataSet.read(folder).in_words(settings.least(False)), ("accepted", accepted)]


def data_set_table(settings: SiteSettings, kit: KitFiles | None = None) -> list[Table]:
    words = data_set_words(settings, kit)
    return [Table(TITLE, ("what", "words"), [list(row) for row in words])] if words else []


def data_set_findings(
    settings: SiteSettings, of_kit: bool, is_read: bool, kit: KitFiles | None = None
) -> Iterator[Finding]:
    """Check that a person accepted the data set, and that the data set's files have not changed since the acceptance.

    If the data have no data set yet, a finding explains how to make one.
    """
    source = settings.data
    if source is None or settings.public_data:
        return
    if source.data_set is None:
        if of_kit and settings.describes_data:
            told = "medsilo.yaml describes the data by keys, which nobody has accepted"
            yield Finding(WHERE, "stops" if is_read else "note", told, MAKE)
        return
    own = DataSet.read(source.data_set)
    if not of_kit and not (source.data_set / ACCEPTED).exists():  # without a kit, acceptance is optional
        yield Finding(WHERE, "note", f"nobody has accepted data set {own.name}, which a kit needs", ACCEPT)
        return
    given = check_accepted(source.data_set, _key(kit))
    check_unchanged(source.data_set)
    told = f"data set {own.name}, {own.identity[:12]}, accepted by {given.by}; its files are unchanged"
    yield Finding(WHERE, "ok", told)
    if not own.patients.known:
        yield Finding(WHERE, "note", f"patients are not named; {own.patients.by}", "name them where you can")


def _key(kit: KitFiles | None) -> Any:
    return kit.key_for("data set") if kit else None
