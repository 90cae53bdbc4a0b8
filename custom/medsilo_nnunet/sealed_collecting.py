"""Hospitals measured by a job whose server reads sums alone.

All of them agree on keys, and then seal two sums in a row: their numbers of cases, by which nnU-Net draws intensities,
and their fingerprints, on the grid of which all told the spacings before. Masks are those of a pairwise round of a
sealed study with the highest threshold: it takes every hospital to open a sum, so nobody can drop out, and the server
learns no other sum. Nothing is kept on a disk: a hospital that stops begins anew with fresh keys.
"""

from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from medsilo.extend import (
    BESIDE,
    CHECK,
    MOST_SITES,
    PER_TENSOR,
    SLACK,
    Assembly,
    Bounds,
    Channel,
    Deal,
    Gathering,
    Inquiry,
    Introduction,
    MaskedSums,
    MedsiloError,
    Member,
    Message,
    Name,
    Offer,
    Parcel,
    Refused,
    Reveal,
    SealedBlock,
    SiteOfInquiry,
    Stop,
    SumMemory,
    Tensors,
    Terms,
    UnmaskingRequest,
    package_facts,
)
from medsilo_nnunet.collecting import TOLD_CASES, AllHospitals, MeasuringAsked, MeasuringSite
from medsilo_nnunet.fingerprint import Fingerprint, samples_of
from medsilo_nnunet.fingerprint_message import Means, MeasuredTogether, ToldFingerprint
from medsilo_nnunet.question import SegmentationQuestion, read_question
from medsilo_nnunet.sealed_counts import INTENSITIES, MOST_PLACES, SHARES, Grid, cases_block, cases_of, cases_told

TOGETHER = "together.json"
SERVER = "the server"
SEALED = "fingerprint"  # the group in which sealed counts travel, as a hospital's privacy.json lists it
CASES, COUNTS = 1, 2  # the two sums
WORD = 8  # bytes

Task = Literal["keys", "meet", "measure", "offer", "seal", "open"]


class SealedRequest(MeasuringAsked):
    """A question of the server to a hospital that seals."""

    task: Task
    study: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    sites: Annotated[tuple[Name, ...], Field(max_length=MOST_SITES, strict=False)]
    sum: Literal[1, 2] = 1
    letter: dict[str, Any] = {}
    grid: Grid | None = None  # of all hospitals, when they seal their counts


class KeysTold(Message):
    """A hospital's answer when it is asked for its keys."""

    introduction: dict[str, Any]
    means: Means


def terms_of(study: str, question: SegmentationQuestion, sites: Sequence[str]) -> Terms:
    """Return the terms of a collecting."""
    return Terms(study, question.hash, tuple(sites), threshold=len(sites))


class SealedMeasuringSite(MeasuringSite):
    """A hospital's side: it tells the spacings of its images, and all else sealed. It answers nothing in clear."""

    def __init__(self, question: SegmentationQuestion, own: SiteOfInquiry) -> None:
        super().__init__(question, own)
        self.signer, self.memory = own.signer(), SumMemory()
        self.member: Member | None = None
        self.told: Fingerprint | None = None
        self.blocks: dict[int, SealedBlock] = {}  # as they were sealed, by the sum

    def answer(self, parcel: Parcel, stop: Stop = lambda: None) -> Parcel:
        asked = SealedRequest.read(parcel.facts)
        self.check(asked)
        if asked.task == "keys":
            return Parcel(facts=self._keys(asked).model_dump(mode="json"))
        if self.member is None or self.member.terms != terms_of(asked.study, self.question, asked.sites):
            raise Refused("the server: it goes on with a collecting that this hospital is not in; collect again")
        work: dict[str, Callable[[Member, SealedRequest, Stop], Parcel]] = {
            "meet": self._meet,
            "measure": self._measure,
            "offer": self._offer,
            "seal": self._seal,
            "open": self._open,
        }
        return work[asked.task](self.member, asked, stop)

    def _keys(self, asked: SealedRequest) -> KeysTold:
        terms = terms_of(asked.study, self.question, asked.sites)
        held = self.counted()
        self.member = Member.begin(terms, self.own.name, self.signer, self.memory)
        self.told, self.blocks = None, {}
        means = Means(reader=held.reader, memory=held.memory)
        return KeysTold(introduction=self.member.introduction().facts(), means=means)

    def _meet(self, member: Member, asked: SealedRequest, stop: Stop) -> Parcel:
        member.meet(Assembly.read(SERVER, asked.letter))
        return Parcel()

    def _measure(self, member: Member, asked: SealedRequest, stop: Stop) -> Parcel:
        told = self.measured(asked, stop)
        self.told = told.fingerprint(self.question)
        return Parcel(facts=Grid.of(self.told).model_dump(mode="json"))

    def _offer(self, member: Member, asked: SealedRequest, stop: Stop) -> Parcel:
        return Parcel(facts=member.offer(asked.sum).facts())

    def _seal(self, member: Member, asked: SealedRequest, stop: Stop) -> Parcel:
        deal = Deal.read(SERVER, asked.letter)
        if deal.round != asked.sum or asked.sum in self.blocks:
            raise Refused("the server: it asks for a sum twice, or for another one than it deals; collect again")
        block, counts = self._counts(asked)
        sealed = member.seal(deal, [block], {block.name: counts})
        self.blocks[asked.sum] = block
        return Parcel({SEALED: sealed})

    def _counts(self, asked: SealedRequest) -> tuple[SealedBlock, Tensors]:
        sites = len(asked.sites)
        if asked.sum == CASES:
            return cases_block(sites), cases_told(self.counted().cases)
        if self.told is None or asked.grid is None:
            raise Refused("the server: it asks for counts before this hospital has measured, or gives no grid")
        return asked.grid.block(len(self.question.channels), sites), asked.grid.counts(self.told)

    def _open(self, member: Member, asked: SealedRequest, stop: Stop) -> Parcel:
        if asked.sum not in self.blocks:
            raise Refused("the server: it opens a sum that this hospital has not sealed")
        request = UnmaskingRequest.read(SERVER, asked.letter)
        return Parcel(facts=member.unmask(request, [self.blocks[asked.sum]]).facts())


class SealedCollecting:
    """The server's side: it relays letters, and reads two sums."""

    def __init__(self, question: SegmentationQuestion, channel: Channel, sites: Sequence[str], timeout: float) -> None:
        self.question, self.package = question, package_facts()
        self.terms = terms_of(token_hex(16), question, sorted(sites))
        self.asking = AllHospitals(channel, self.terms.sites, timeout)

    def collect(self) -> MeasuredTogether:
        """Return the fingerprint of all hospitals; raises MedsiloError unless all of them answer all the time."""
        sites, channels = len(self.terms.sites), len(self.question.channels)
        means, assembly = self._agreed()
        cases = cases_of(self._sum(CASES, assembly, cases_block(sites)))
        grids: dict[str, Grid] = {}

        def measured(site: str, reply: Parcel) -> None:
            grids[site] = Grid.read(reply.facts)

        self._ask("measure", measured, cases=cases)
        grid = Grid.read(Grid.joined(grids.values()).model_dump())
        sums = self._sum(COUNTS, assembly, grid.block(channels, sites), grid=grid)
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

    def _agreed(self) -> tuple[dict[str, Means], Assembly]:
        means: dict[str, Means] = {}
        gathering = Gathering(self.terms)

        def introduced(site: str, reply: Parcel) -> None:
            told = KeysTold.read(reply.facts)
            gathering.add(site, Introduction.read(site, told.introduction))
            means[site] = told.means

        self._ask("keys", introduced)
        assembly = gathering.assembly()
        self._ask("meet", _nothing, letters=dict.fromkeys(self.terms.sites, assembly.facts()))
        return means, assembly

    def _sum(self, number: int, assembly: Assembly, block: SealedBlock, **about: Any) -> Tensors:
        """Return the sum of what all hospitals seal."""
        sums = MaskedSums(self.terms, assembly, number, [block])

        def offered(site: str, reply: Parcel) -> None:
            sums.offer(site, Offer.read(site, reply.facts))

        def sealed(site: str, reply: Parcel) -> None:
            sums.add(site, reply.groups.get(SEALED, {}))

        def revealed(site: str, reply: Parcel) -> None:
            sums.reveal(site, Reveal.read(site, reply.facts))

        self._ask("offer", offered, sum=number)
        deals = {site: deal.facts() for site, deal in sums.deals().items()}
        self._ask("seal", sealed, deals, sum=number, **about)
        asked = sums.request().facts()
        self._ask("open", revealed, dict.fromkeys(self.terms.sites, asked), sum=number)
        return sums.read(block, sums.open()[1])

    def _ask(
        self,
        task: Task,
        receive: Callable[[str, Parcel], None],
        letters: Mapping[str, dict[str, Any]] | None = None,
        **about: Any,
    ) -> None:
        def outgoing(site: str) -> Parcel:
            asked = SealedRequest(
                question=self.question.hash,
                package=self.package,
                timeout=self.asking.timeout,
                task=task,
                study=self.terms.study,
                sites=self.terms.sites,
                letter=(letters or {}).get(site, {}),
                **about,
            )
            return Parcel(facts=asked.model_dump(mode="json"))

        self.asking.all(outgoing, receive)


def sealed_bounds(question: SegmentationQuestion) -> Bounds:
    """Return the bounds of what a hospital may answer."""
    words = MOST_PLACES + SHARES + INTENSITIES * len(question.channels) + CHECK
    return Bounds(SLACK + WORD * words, BESIDE + PER_TENSOR + TOLD_CASES)


def collected(
    question: SegmentationQuestion, channel: Channel, sites: Sequence[str], timeout: float
) -> dict[str, MeasuredTogether]:
    """Return what all hospitals measured, in one file."""
    return {TOGETHER: SealedCollecting(question, channel, sites, timeout).collect()}


INQUIRY = Inquiry(read_question, sealed_bounds, collected, SealedMeasuringSite, sealed=True)


def _nothing(site: str, reply: Parcel) -> None:
    """Take an answer that tells nothing but that it came."""
