"""Hospitals measured by a job whose server reads sums alone.

All of them agree on keys, and then seal two sums in a row: their numbers of cases, by which nnU-Net draws intensities,
and their fingerprints, on the grid of which all told the spacings before.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from medsilo.extend import (
    Bounds,
    Channel,
    Inquiry,
    MedsiloError,
    Message,
    Parcel,
    Receive,
    Refused,
    SealedSums,
    SiteOfInquiry,
    Stop,
    SummedSite,
    SumRequest,
    Tensors,
    package_facts,
    sealed_bounds,
)
from medsilo_nnunet.collecting import TOLD_CASES, AllHospitals, MeasuringSite, QuestionPart
from medsilo_nnunet.fingerprint import Fingerprint, samples_of
from medsilo_nnunet.fingerprint_message import Means, MeasuredTogether, ToldFingerprint
from medsilo_nnunet.question import SegmentationQuestion, read_question
from medsilo_nnunet.sealed_counts import CASES_SHAPE, INTENSITIES, MOST, MOST_PLACES, SHARES, Grid, cases_of, cases_told

TOGETHER = "together.json"
SEALED = "fingerprint"  # the group in which sealed counts travel, as a hospital's privacy.json lists it
CASES, COUNTS = 1, 2  # the two sums

Task = Literal["keys", "measure", "seal"]


class SealedRequest(QuestionPart, SumRequest):
    """A question of the server to a hospital that seals."""

    task: Task
    sum: Literal[1, 2] = 1  # no third: sums of other counts would tell more than one
    grid: Grid | None = None  # of all hospitals, when they seal their counts


class KeysAnswer(Message):
    """A hospital's answer when it is asked for its keys."""

    introduction: dict[str, Any]
    means: Means


class SealedMeasuringSite(MeasuringSite):
    """A hospital's side: it tells the spacings of its images, and all else sealed. It answers nothing in clear."""

    def __init__(self, question: SegmentationQuestion, own: SiteOfInquiry) -> None:
        super().__init__(question, own)
        self.summed = SummedSite(own.name, own.signer(), question.hash, question.sites)
        self.told: Fingerprint | None = None

    def answer(self, parcel: Parcel, stop: Stop = lambda: None) -> Parcel:
        asked = SealedRequest.read(parcel.facts)
        self.check(asked)
        if asked.task == "keys":
            return Parcel(facts=self._keys(asked).model_dump(mode="json"))
        self.summed.check(asked)
        if asked.task == "measure":
            self.told = self.measured(asked, stop).fingerprint(self.question)
            return Parcel(facts=Grid.of(self.told).model_dump(mode="json"))
        return self.summed.seal(asked, SEALED, self._counts(asked), MOST)

    def _keys(self, asked: SealedRequest) -> KeysAnswer:
        held = self.counted()
        self.told = None
        return KeysAnswer(
            introduction=self.summed.introduction(asked), means=Means(reader=held.reader, memory=held.memory)
        )

    def _counts(self, asked: SealedRequest) -> Tensors:
        if asked.sum == CASES:
            return cases_told(self.counted().cases)
        if self.told is None or asked.grid is None:
            raise Refused("the server: it asks for counts before this hospital has measured, or gives no grid")
        return asked.grid.counts(self.told)


class SealedCollecting:
    """The server's side: it relays keys, and reads two sums."""

    def __init__(self, question: SegmentationQuestion, channel: Channel, timeout: float) -> None:
        self.question, self.package = question, package_facts()
        self.sums = SealedSums(question.hash, question.sites, self._ask)
        self.asking = AllHospitals(channel, self.sums.sites, timeout)

    def collect(self) -> MeasuredTogether:
        """Return the fingerprint of all hospitals; raises MedsiloError unless all of them answer all the time."""
        means: dict[str, Means] = {}

        def introduced(site: str, reply: Parcel) -> None:
            told = KeysAnswer.read(reply.facts)
            self.sums.introduce(site, told.introduction)
            means[site] = told.means

        self._ask("keys", introduced)
        cases = cases_of(self.sums.sum(CASES, SEALED, CASES_SHAPE, MOST))
        grids: dict[str, Grid] = {}

        def measured(site: str, reply: Parcel) -> None:
            grids[site] = Grid.read(reply.facts)

        self._ask("measure", measured, cases=cases)
        grid = Grid.read(Grid.joined(grids.values()).model_dump())
        shapes = grid.shapes(len(self.question.channels))
        sums = self.sums.sum(COUNTS, SEALED, shapes, MOST, grid=grid)
        whole = grid.fingerprint(samples_of(cases), sums)
        try:
            told = ToldFingerprint.of(whole)
            together = MeasuredTogether(question=self.question.hash, told=told, cases=cases, holdings=means)
        except ValidationError as error:
            raise MedsiloError(
                "the hospitals' sealed counts do not fit together, and nobody can tell whose are wrong; collect "
                "without --sealed to see them",
                private=str(error),
            ) from error
        together.fingerprint(self.question)
        return together

    def _ask(self, task: Task, receive: Receive, letters: Mapping[str, Any] | None = None, **about: Any) -> None:
        def outgoing(site: str) -> Parcel:
            asked = SealedRequest(
                question=self.question.hash,
                package=self.package,
                timeout=self.asking.timeout,
                task=task,
                study=self.sums.study,
                letter=(letters or {}).get(site, {}),
                **about,
            )
            return Parcel(facts=asked.model_dump(mode="json"))

        self.asking.all(outgoing, receive)


def bounds_of(question: SegmentationQuestion) -> Bounds:
    """Return the bounds of what a hospital may answer."""
    return sealed_bounds(MOST_PLACES + SHARES + INTENSITIES * len(question.channels), TOLD_CASES)


def collected(
    question: SegmentationQuestion, channel: Channel, sites: Sequence[str], timeout: float
) -> dict[str, MeasuredTogether]:
    """Return what all hospitals measured, in one file."""
    return {TOGETHER: SealedCollecting(question, channel, timeout).collect()}


INQUIRY = Inquiry(read_question, bounds_of, collected, SealedMeasuringSite, sealed=True)
