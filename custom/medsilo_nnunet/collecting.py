"""Hospitals measured by a job: the server asks each for its cases, and then for the fingerprint of all of them.

What it collects are the very messages that hospitals would have sent as files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from medsilo.extend import (
    BESIDE,
    FILE_NAME,
    SLACK,
    Bounds,
    Channel,
    DataSource,
    Inquiry,
    MedsiloError,
    Message,
    Parcel,
    Receive,
    Refused,
    SiteOfInquiry,
    Stop,
    check_package,
    data_set,
    package_facts,
)
from medsilo_nnunet.fingerprint import samples_of
from medsilo_nnunet.fingerprint_message import MOST_BINS, Hash, HeldCases, MeasuredSite
from medsilo_nnunet.measuring_cases import held, measured, memory_of
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.question import SegmentationQuestion, read_question

TOLD_CASES = 1_000_000  # values of spacings, sizes and shares in a message
BYTES = 9  # of a packed number


class MeasuringRequest(Message):
    """A question of the server to a hospital."""

    task: Literal["count", "measure"]
    question: Hash
    package: dict[str, Any]  # the server's medsilo
    cases: Annotated[int, Field(ge=1)] | None = None  # of all hospitals together, when they measure
    timeout: Annotated[float, Field(gt=0)] = 604_800


class MeasuringSite:
    """A hospital's side: it counts its cases, and measures them."""

    def __init__(self, question: SegmentationQuestion, own: SiteOfInquiry) -> None:
        self.question, self.own, self.settings, self.folder = question, own, own.settings, own.folder

    def answer(self, parcel: Parcel, stop: Stop = lambda: None) -> Parcel:
        """Do what a parcel asks and answer it; `stop` is asked before every case and raises to end the work."""
        asked = MeasuringRequest.read(parcel.facts)
        check_package(package_facts(), asked.package)
        if asked.question != self.question.hash:
            raise Refused("the job's question at this site differs from the server's; submit the job again")
        told = self.counted() if asked.task == "count" else self.measured(asked, stop)
        return Parcel(facts=told.model_dump(mode="json"))

    def counted(self) -> HeldCases:
        """Return what the hospital has."""
        return held(self._data(), self._least, memory_of(self.settings))

    def measured(self, asked: MeasuringRequest, stop: Stop) -> MeasuredSite:
        """Measure what the hospital has."""
        if asked.cases is None:
            raise Refused("the server does not say how many cases all hospitals have")
        data = self._data()
        self._check_others(self._source().folder, data, self._least)
        return measured(data, self.question, asked.cases, self._least, memory_of(self.settings), stop)

    @property
    def _least(self) -> int:
        return self.settings.count_unit(synthetic=False)

    def _data(self) -> RawData:
        source = self._source()
        return RawData.of(source.folder, self.question, source)

    def _source(self) -> DataSource:
        """Return where the data are; raises Refused where the hospital lets no fingerprint leave by a job."""
        if self.settings.approval != "none":
            raise Refused(
                f"this hospital approves what runs (approval in its {FILE_NAME}), and there is no plan yet; ask its "
                "engineer for the file of medsilo nnunet measure"
            )
        if self.settings.privacy is not None:
            raise Refused(
                f"this hospital answers only with noise (privacy in its {FILE_NAME}), which a fingerprint has not"
            )
        if self.settings.data is None:
            raise Refused(f"this hospital's {FILE_NAME} does not say where its data are; set 'data'")
        return self.settings.data

    def _check_others(self, place: Path, data: RawData, least: int) -> None:
        """Raise Refused where the difference to another answer would tell of few cases."""
        if not self.settings.protects(synthetic=False):
            return
        patients = tuple(dict.fromkeys(entry.patient for entry in data.cases))
        if self.own.book.near(data_set(place, "nnunet"), {"train": patients}, least):
            raise Refused(
                f"another answer was about all of these cases but fewer than {least} (smallest_metric in this "
                f"hospital's {FILE_NAME}); measure the cases of then"
            )


def collect(
    question: SegmentationQuestion, channel: Channel, sites: Sequence[str], timeout: float
) -> dict[str, MeasuredSite]:
    """Return what each hospital measured; raises MedsiloError unless all of them answer both times."""
    holding: dict[str, HeldCases] = {}
    told: dict[str, MeasuredSite] = {}
    package = package_facts()

    def counted(site: str, reply: Parcel) -> None:
        holding[site] = HeldCases.read(reply.facts)

    def fingerprint(site: str, reply: Parcel) -> None:
        own = MeasuredSite.read(reply.facts)
        own.fingerprint(question)
        if own.holding != holding[site] or own.told.samples != samples_of(cases):
            raise Refused("it measured other data than it counted, or drew another number of intensities; ask again")
        told[site] = own

    def ask(what: Literal["count", "measure"], receive: Receive, cases: int | None) -> None:
        asked = MeasuringRequest(task=what, question=question.hash, package=package, cases=cases, timeout=timeout)
        missing = channel.ask(sites, lambda site: Parcel(facts=asked.model_dump(mode="json")), receive, timeout)
        if missing:
            why = "; ".join(f"{site} {gone.text}" for site, gone in sorted(missing.items()))
            raise MedsiloError(f"plans need all hospitals: {why}")

    ask("count", counted, None)
    cases = sum(own.cases for own in holding.values())
    ask("measure", fingerprint, cases)
    return told


def fingerprint_bounds(question: SegmentationQuestion) -> Bounds:
    """Return the bounds of what a hospital may answer."""
    values = BESIDE + TOLD_CASES + 2 * MOST_BINS * len(question.channels)
    return Bounds(SLACK + BYTES * values, values)


def collected(
    question: SegmentationQuestion, channel: Channel, sites: Sequence[str], timeout: float
) -> dict[str, MeasuredSite]:
    """Return what each hospital measured, by the name of its file."""
    asked = question.sites or sites
    return {f"{site}.json": own for site, own in collect(question, channel, asked, timeout).items()}


INQUIRY = Inquiry(read_question, fingerprint_bounds, collected, MeasuringSite)
