"""Fingerprints whose sums alone the server reads, against the same hospitals' in the open."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medsilo.cli import main
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.tensors import Tensors
from medsilo.federation.inprocess import Loop
from medsilo.federation.inquiry import SiteOfInquiry
from medsilo.federation.sealed_sums import SealedSums
from medsilo.federation.seams import Missing, Outgoing, Receive
from medsilo.learning.loop import Stop
from medsilo.runs.messages import Parcel
from medsilo.sealing import member
from medsilo.sealing.signing import Unsigned
from medsilo.site.settings import SiteSettings
from medsilo_nnunet import sealed_counts
from medsilo_nnunet.collecting import QuestionPart, collect, collected
from medsilo_nnunet.fingerprint import CaseFacts, Fingerprint
from medsilo_nnunet.fingerprint_message import HeldCases, MeasuredSite, MeasuredTogether, ToldFingerprint, read_measured
from medsilo_nnunet.float_bins import FloatHistogram, rounded
from medsilo_nnunet.planning import make_plans
from medsilo_nnunet.sealed_collecting import SEALED, SealedCollecting, SealedMeasuringSite
from medsilo_nnunet.sealed_counts import Grid, numbers_at, places_of
from tests.federations import KINDS, Federation, federation


class Site(SealedMeasuringSite):
    """A hospital whose images are numbers; with `least` cases behind each that leaves."""

    def __init__(self, drawn: Federation, site: str, folder: Path, least: int = 1) -> None:
        super().__init__(drawn.question, SiteOfInquiry(site, SiteSettings(public_data=True), folder, Unsigned))
        self.cases: Sequence[CaseFacts] = drawn.hospitals[site]
        self.samples, self.least = drawn.samples, least

    def counted(self) -> HeldCases:
        return HeldCases(cases=len(self.cases) // self.least * self.least, reader="SimpleITKIO", memory=11.0)

    def measured(self, asked: QuestionPart, stop: Stop) -> MeasuredSite:
        own = Fingerprint.of(self.cases, self.samples, self.least)
        return MeasuredSite(question=self.question.hash, holding=self.counted(), told=ToldFingerprint.of(own))


class Seen(Loop):
    """Hospitals in this process, and all that the server gets of them."""

    def __init__(self, sites: dict[str, Site]) -> None:
        super().__init__(sites)  # type: ignore[arg-type]
        self.sites = sites
        self.replies: list[tuple[str, Parcel]] = []
        self.asked: list[tuple[str, Parcel]] = []

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        def seen(site: str, reply: Parcel) -> None:
            self.replies.append((site, reply))
            receive(site, reply)

        def asked(site: str) -> Parcel:
            self.asked.append((site, outgoing(site)))
            return self.asked[-1][1]

        return super().ask(sites, asked, seen, timeout)

    def words(self, site: str) -> list[torch.Tensor]:
        """Return what a site sealed: its number of cases, and its fingerprint."""
        return [own for name, reply in self.replies if name == site for own in reply.groups.get(SEALED, {}).values()]


def hospitals(drawn: Federation, folder: Path, least: int = 1) -> Seen:
    return Seen({site: Site(drawn, site, folder / site, least) for site in drawn.hospitals})


def of_so_many(count: int) -> Federation:
    own = federation(1, 2)
    names = sorted(own.hospitals)[:count]
    question = own.question.model_copy(update={"sites": tuple(names)})
    return replace(own, question=question, hospitals={name: own.hospitals[name] for name in names})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Federation:
    """Return three hospitals with MR, each with two cases or more, that draw few intensities."""
    found = of_so_many(3)
    monkeypatch.setattr("medsilo_nnunet.sealed_collecting.samples_of", lambda cases: found.samples)
    return found


def sealed(seen: Seen, drawn: Federation) -> MeasuredTogether:
    return SealedCollecting(drawn.question, seen, 60).collect()


def opened(seen: Seen, least: int = 1) -> Fingerprint:
    return Fingerprint.merged(Fingerprint.of(own.cases, own.samples, least) for own in seen.sites.values())


def same(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether two fingerprints agree in all but the shares that are left after cropping."""
    channels = zip(one.channels, other.channels, strict=True)
    alike = all(
        np.array_equal(a.values, b.values) and np.array_equal(a.counts, b.counts) and a.total for a, b in channels
    )
    return alike and one.extents == other.extents and one.samples == other.samples and one.cases == other.cases


# ------------------------------------------------------------------------------------------------------ places
def test_each_number_of_float32_has_a_place_of_its_own() -> None:
    info = np.finfo(np.float32)
    numbers = np.array([0, 1, -1, 8191, -1024, 0.1, info.max, info.min, info.smallest_subnormal, -info.tiny])
    values = np.unique(rounded(numbers))
    places = places_of(values)
    assert np.array_equal(numbers_at(places), values)
    assert (np.diff(places) > 0).all() and places[0] >= 0 and places[-1] < sealed_counts.INTENSITIES
    whole = np.arange(sealed_counts.ZERO - 9000, sealed_counts.ZERO + 9000)
    assert np.array_equal(places_of(numbers_at(whole)), whole)
    with pytest.raises(Refused, match="32 bits"):
        places_of(np.array([1e-60]))


@pytest.mark.parametrize("number", range(len(KINDS)))
@pytest.mark.parametrize("least", [1, 3])
def test_counts_on_a_common_grid_add_up_to_the_fingerprint_of_all(number: int, least: int) -> None:
    drawn = federation(number + 7, least)
    each = [Fingerprint.of(cases, drawn.samples, least) for cases in drawn.hospitals.values()]
    grid = Grid.joined(map(Grid.of, each))
    sums: Tensors = {}
    for own in each:
        counts = grid.counts(own)
        sums = {name: sums.get(name, 0) + tensor for name, tensor in counts.items()}
    whole, wanted = grid.fingerprint(drawn.samples, sums), Fingerprint.merged(each)
    assert whole.extents == wanted.extents and whole.cases == wanted.cases
    for ours, theirs in zip(whole.channels, wanted.channels, strict=True):
        assert np.array_equal(ours.values, theirs.values) and np.array_equal(ours.counts, theirs.counts)
    low = [share < 0.75 for share in sorted(whole.shares.elements())]
    assert low == [share < 0.75 for share in sorted(wanted.shares.elements())]


# ------------------------------------------------------------------------------------------------------ a collecting
@pytest.mark.parametrize("least", [1, 2])
def test_plans_of_sealed_sums_are_those_of_open_fingerprints(drawn: Federation, tmp_path: Path, least: int) -> None:
    pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
    seen = hospitals(drawn, tmp_path, least)
    together = read_measured(sealed(seen, drawn).model_dump(mode="json"))
    whole, wanted = together.fingerprint(drawn.question), opened(seen, least)
    assert same(whole, wanted)
    means = together.means("together")
    assert means.keys() == drawn.hospitals.keys() and means["hospital-0"].memory == 11
    question, file, plans = (tmp_path / name for name in ("question.yaml", "together.json", "plans.json"))
    question.write_text(drawn.question.in_yaml())
    file.write_text(together.model_dump_json())
    assert main(["nnunet", "plan", str(question), str(file), "-o", str(plans)]) == 0
    assert json.loads(plans.read_text()) == make_plans(drawn.question, wanted, means).plans
    assert main(["nnunet", "plan", str(question), str(file), str(file), "-o", str(plans)]) == 1


def _nothing(words: Any, streams: Any) -> None:
    """Put no mask on."""


@pytest.mark.parametrize("masked", [True, False], ids=["sealed", "without masks"])
def test_what_the_server_sees_of_a_hospital_is_not_its_fingerprint(
    drawn: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    if not masked:  # as it would look if nothing was hidden: so the test can tell
        monkeypatch.setattr(member, "add_streams", _nothing)
    seen = hospitals(drawn, tmp_path)
    whole = sealed(seen, drawn).fingerprint(drawn.question)
    assert same(whole, opened(seen))
    for name, site in seen.sites.items():
        assert site.told is not None
        grid = Grid.joined(Grid.of(own.told) for own in seen.sites.values() if own.told)
        counts = {1: sealed_counts.cases_told(len(site.cases)), 2: grid.counts(site.told)}
        for number, words in enumerate(seen.words(name), 1):
            block = site.summed.blocks[number]
            clear = torch.from_numpy(block.flat.encode(counts[number], block.fixed).view(np.int64))
            alike = float((words == clear).double().mean())
            assert (alike == 0) if masked else (alike == 1)
    told = {key for _, reply in seen.replies for key in reply.facts}
    assert not told & {"cases", "holding", "told", "shares", "counts"}


def test_a_hospital_that_seals_answers_nothing_in_clear(drawn: Federation, tmp_path: Path) -> None:
    seen = hospitals(drawn, tmp_path)
    with pytest.raises(MedsiloError, match="plans need all hospitals: hospital-0 refused"):
        collect(drawn.question, seen, list(seen.sites), 60)
    assert not seen.replies


def test_two_hospitals_have_no_sum_to_hide_in(drawn: Federation, tmp_path: Path) -> None:
    two = of_so_many(2)
    with pytest.raises(MedsiloError, match="2 sites; it needs 3"):
        SealedCollecting(two.question, hospitals(two, tmp_path), 60)


def test_whoever_is_connected_does_not_count_as_a_hospital(drawn: Federation, tmp_path: Path) -> None:
    """A lead's or the server's own certificate would be as good as a hospital's."""
    nobody = replace(drawn, question=drawn.question.model_copy(update={"sites": ()}))
    with pytest.raises(MedsiloError, match="the question names no hospitals"):
        SealedCollecting(nobody.question, hospitals(nobody, tmp_path), 60)
    question = tmp_path / "question.yaml"
    question.write_text(nobody.question.in_yaml())
    command = ["nnunet", "collect", str(question), "--kit", str(tmp_path), "--sealed", "-o", str(tmp_path / "out")]
    assert main(command) == 1


def test_a_server_that_names_fewer_hospitals_than_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two that help it, the sum of three would be the counts of the third."""
    all_four, three = of_so_many(4), of_so_many(3)
    seen = hospitals(all_four, tmp_path)
    lying = SealedCollecting(all_four.question, seen, 60)
    lying.sums = SealedSums(three.question.hash, three.question.sites, lying._ask)
    lying.asking = replace(lying.asking, sites=lying.sums.sites)
    with pytest.raises(MedsiloError, match="hospital-0 refused: .*the sites whose keys it relays are not those"):
        lying.collect()
    assert not any(reply.groups for _, reply in seen.replies)


def test_hospitals_that_the_question_does_not_name_are_not_asked(drawn: Federation, tmp_path: Path) -> None:
    asked: list[str] = []

    class Asked(Loop):
        def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
            asked.extend(sites)
            return {site: Missing("lost", "no answer") for site in sites}

    with pytest.raises(MedsiloError, match="plans need all hospitals"):
        collected(drawn.question, Asked({}), ["lead", *drawn.hospitals], 60)
    assert asked == sorted(drawn.hospitals)


def more(counts: Tensors) -> Tensors:
    """Return counts with one intensity too many for the cases."""
    counts["channel-00"][5] += 1e7
    return counts


def less(counts: Tensors) -> Tensors:
    counts["channel-00"][5] -= 1
    return counts


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (more, "do not fit together, and nobody can tell whose"),
        (less, "do not add up to whole numbers"),
        (lambda counts: counts | {"shares": 1.5 * counts["shares"]}, "do not add up to whole numbers|fit together"),
        (lambda counts: counts | {"shares": counts["shares"] / 0}, "NaN|beyond the bound"),
    ],
)
def test_sums_that_are_no_fingerprint_are_refused(
    drawn: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Callable[[Tensors], Tensors], told: str
) -> None:
    honest, seen = Grid.counts, hospitals(drawn, tmp_path)

    def lying(self: Grid, own: Fingerprint) -> Tensors:
        counts = honest(self, own)
        return changed(counts) if own is seen.sites["hospital-1"].told else counts

    monkeypatch.setattr(Grid, "counts", lying)
    with pytest.raises(MedsiloError, match=told):
        sealed(seen, drawn)


def test_a_server_gets_one_sum_of_each_kind_on_a_grid_that_holds_all(drawn: Federation, tmp_path: Path) -> None:
    seen = hospitals(drawn, tmp_path)
    sealed(seen, drawn)
    (asked,) = [reply.facts for name, reply in seen.replies if name == "hospital-0" and "sizes" in reply.facts]
    small = Grid.read(asked).model_copy(update={"spacings": [[1e5]] * 3})
    with pytest.raises(Refused, match="no place for a spacing"):
        small.counts(seen.sites["hospital-0"].told)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="too many different spacings"):
        Grid.read({"spacings": [[1.0 + place for place in range(300)]] * 3, "sizes": 65_536})
    *_, last = (asked for site, asked in seen.asked if site == "hospital-0" and asked.facts["task"] == "seal")
    with pytest.raises(Refused, match="the server: it asks for a sum twice"):
        seen.sites["hospital-0"].answer(last)


def test_an_empty_channel_is_told_as_empty() -> None:
    own = replace(Fingerprint.of(federation(1, 2).hospitals["hospital-0"], 5), channels=(FloatHistogram.of([]),) * 2)
    grid = Grid.of(own)
    whole = grid.fingerprint(5, grid.counts(own))
    assert len(whole.channels) == 2 and not any(channel.total for channel in whole.channels)
