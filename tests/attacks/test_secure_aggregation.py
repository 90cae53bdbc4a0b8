"""A server that lies, against secure aggregation: it leads real hospitals and computes from their answers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from medsilo.core.errors import Aborted, MedsiloError, ParticipationError
from medsilo.federation import coordinator
from medsilo.federation.asking import Missing
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.participant import Participant
from medsilo.federation.sealed.sealed_server import SealedServer
from medsilo.federation.sealed.what import SealedGroup
from medsilo.plan import Plan
from medsilo.runs.messages import Parcel
from medsilo.runs.record import Record
from medsilo.site.settings import SiteSettings
from tests.conftest import make_plan
from tests.unit.test_coordinator import LOST, SMALL, Answers, Scripted, honest

HOSPITALS = ["a", "b", "c", "d"]
CPU = SiteSettings(device="cpu", smallest_average=1)
RULES = [*SMALL, "training.learning_rate=0.01", "training.rounds=3", "tracking.select=last"]
GO_ON = ["participation.when_missing=continue", "participation.minimum=3"]
Model = dict[str, Tensor]


class Liar(SealedServer):
    """A server that notes every sum that the hospitals open for it."""

    skips = 0  # numbers of the key agreement
    stops_after = 0  # the round behind whose sum it ends, so that it can repeat it
    opened: list[tuple[tuple[str, ...], Model, int]]

    def agree(self, sites: Sequence[str], heaviest: int) -> None:
        self.store.agreement += self.skips
        super().agree(sites, heaviest)

    def _repeated(self, number: int) -> tuple[str, ...]:
        return ()  # whatever the hospitals tell it of sums that they have opened

    def _hand_over(self, own: SealedGroup, mean: Mapping[str, Tensor], sites: Sequence[str]) -> None:
        total = int(sum(self._weights(own, sites).values()))
        type(self).opened.append((tuple(sites), {name: tensor.double() for name, tensor in mean.items()}, total))
        super()._hand_over(own, mean, sites)

    def finish(self, number: int) -> None:
        super().finish(number)
        if number == self.stops_after:
            raise Aborted("it has what it wants of this round")


class Hospitals(Scripted):
    """Real hospitals. The test keeps what each of them trained, to compare it with what the server found out."""

    def __init__(self, plan: Plan, folder: Path, lie: Callable[[str, Parcel], Parcel | Missing] | None = None) -> None:
        sites = plan.participation.sites
        members = {site: Participant(plan, site, sites, CPU, folder / "sites" / site) for site in sites}
        super().__init__(members, self._told)
        self.lie = lie
        self.trained: dict[tuple[str, int], Model] = {}
        self.said: dict[str, str] = {}

    def _told(self, site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        told = self.lie(site, asked) if self.lie else asked
        if isinstance(told, Missing):
            return told
        try:
            answers = honest(site, told, lambda: self.participants[site].answer(told))
        except MedsiloError as error:
            self.said.setdefault(site, str(error))
            return Missing.refused(error)
        if asked.facts["task"] == "round":
            state = self.participants[site].state.modules["model"].state_dict()
            self.trained[site, asked.facts["round"]] = {name: tensor.clone() for name, tensor in state.items()}
        return answers


def lead(plan: Plan, folder: Path, hospitals: Hospitals, resume: bool = False) -> Coordinator:
    server = Coordinator(plan, plan.participation.sites, hospitals, Record(folder), "scripted", settings=CPU)
    server.run(resume)
    return server


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> type[Liar]:
    kind: Any = type("Liar", (Liar,), {"opened": []})
    monkeypatch.setattr(coordinator, "SealedServer", kind)
    return kind  # type: ignore[no-any-return]


def without_d(site: str, asked: Parcel) -> Parcel | Missing:
    return LOST if site == "d" else asked


def furthest(one: Model, other: Model) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one if name in other)


@pytest.mark.parametrize("skips", [0, 3])
def test_a_server_that_skips_an_agreement_and_repeats_a_round_without_one_hospital(
    skips: int, liar: type[Liar], tmp_path: Path
) -> None:
    """It would subtract the two sums of the round: what is left is the model of the hospital that is in one of them."""
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", *GO_ON, sites=HOSPITALS)
    liar.stops_after = 2
    first = Hospitals(plan, tmp_path / "run")
    with pytest.raises(Aborted):
        lead(plan, tmp_path / "run", first)
    liar.skips, liar.stops_after = skips, 0
    again = Hospitals(plan, tmp_path / "run", without_d)
    try:
        lead(plan, tmp_path / "run", again, resume=True)
    except ParticipationError as error:
        assert "round 2" in str(error)
    found = [opened for opened in liar.opened[1:] if set(opened[0]) == {"a", "b", "c"}]
    if found:  # the round was opened over a, b, c too: this is what the server then knows
        (_, whole, all_cases), (_, rest, fewer_cases) = liar.opened[1], found[0]
        cases = all_cases - fewer_cases
        model = {name: (whole[name] * all_cases - rest[name] * fewer_cases) / cases for name in whole}
        pytest.fail(f"it knows d's model to {furthest(model, first.trained['d', 2]):.1e}")
    assert len(again.said) >= 2
    assert all("second, different unmasking of round 2" in said for said in again.said.values())


def test_an_honest_server_repeats_a_round_after_a_dropout(liar: type[Liar], tmp_path: Path) -> None:
    """It stops behind the sum of round 2 over a, b and c, and goes on with these three, with fresh keys."""
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", *GO_ON, sites=HOSPITALS)
    liar.stops_after = 2

    def away(site: str, asked: Parcel) -> Parcel | Missing:
        return LOST if site == "d" and asked.facts["round"] == 2 else asked

    with pytest.raises(Aborted):
        lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run", away))
    liar.stops_after, liar._repeated = 0, SealedServer._repeated  # type: ignore[method-assign]
    server = lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run"), resume=True)
    assert [line.answered for line in server.rounds] == [HOSPITALS, ["a", "b", "c"], HOSPITALS]
