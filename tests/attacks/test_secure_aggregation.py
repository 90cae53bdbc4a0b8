"""A server that lies, against secure aggregation: it leads real hospitals and computes from their answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from medsilo.core.errors import Aborted, MedsiloError, ParticipationError
from medsilo.course.phase import Phase
from medsilo.federation.asking import Missing
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.sealed.identity import KitFiles
from medsilo.federation.sealed.sealed_server import SealedServer
from medsilo.federation.sealed.what import WORDS, SealedGroup
from medsilo.plan import Plan
from medsilo.runs.messages import Joined, Parcel
from medsilo.runs.record import Record
from medsilo.sealing.fixed_point import as_tensor, as_words
from medsilo.sealing.masks import own_mask
from medsilo.sealing.relay import MaskedSums
from medsilo.sealing.streams import add_streams
from medsilo.site.settings import SiteSettings
from tests import sealed
from tests.conftest import make_plan
from tests.sites import site_of
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

    def agree(self, joined: Mapping[str, Joined]) -> None:
        self.store.agreement += self.skips
        super().agree(joined)

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

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        lie: Callable[[str, Parcel], Parcel | Missing] | None = None,
        settings: Mapping[str, SiteSettings] = MappingProxyType({}),
        kits: Mapping[str, KitFiles] = MappingProxyType({}),
    ) -> None:
        sites = plan.participation.sites
        members = {
            site: site_of(plan, site, sites, settings.get(site, CPU), folder / "sites" / site, kit=kits.get(site))
            for site in sites
        }
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
            state = self.participants[site].participant.state.modules["model"].state_dict()
            self.trained[site, asked.facts["round"]] = {name: tensor.clone() for name, tensor in state.items()}
        return answers


def lead(
    plan: Plan, folder: Path, hospitals: Hospitals, resume: bool = False, kit: KitFiles | None = None
) -> Coordinator:
    record = Record(folder)
    server = Coordinator(plan, plan.participation.sites, hospitals, record, "scripted", settings=CPU, kit=kit)
    server.run(resume)
    return server


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


# -------------------------------------------------------------------------------------- numbers of the key agreement
def numbers_of(folder: Path) -> dict[str, list[int]]:
    """Return the agreements that each hospital has keys of."""
    found = {site: (folder / "sites" / site).glob("sealing-*.json") for site in HOSPITALS}
    return {site: sorted(int(path.stem.split("-")[1]) for path in paths) for site, paths in found.items()}


def test_an_honest_servers_numbers_are_not_always_the_last_and_one(tmp_path: Path) -> None:
    """d's line is cut while keys are agreed on, and it comes back when the study goes on: it has missed number 2."""
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", *GO_ON, sites=HOSPITALS)

    def cut(site: str, asked: Parcel) -> Parcel | Missing:
        letters = asked.facts.get("sealing", {})
        if asked.facts["task"] == "round" and asked.facts["round"] == 2:
            raise Aborted("the server was stopped")
        return LOST if site == "d" and ("assembly" in letters or asked.facts["task"] != "agree") else asked

    with pytest.raises(Aborted):
        lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run", joined(cut)))
    lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run"), resume=True)
    assert numbers_of(tmp_path / "run") == {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3], "d": [1, 3]}


def joined(lie: Callable[[str, Parcel], Parcel | Missing]) -> Callable[[str, Parcel], Parcel | Missing]:
    return lambda site, asked: asked if asked.facts["task"] == "join" else lie(site, asked)


def test_a_server_that_stopped_before_it_wrote_the_number(tmp_path: Path) -> None:
    """It comes with number 1 again, is told that 1 was the last, and goes on with 2: no number has two agreements."""
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", sites=HOSPITALS)

    def stop(site: str, asked: Parcel) -> Parcel:
        if asked.facts["task"] == "round":
            raise Aborted("the server was stopped")
        return asked

    with pytest.raises(Aborted):
        lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run", stop))
    before = {path: path.read_bytes() for path in tmp_path.glob("run/sites/*/sealing-1.json")}
    lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run"), resume=True)
    assert numbers_of(tmp_path / "run") == {site: [1, 2] for site in HOSPITALS}
    assert len(before) == 4 and all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("last, often", [(999_000, False), (900, True)])
def test_a_hospital_that_makes_numbers_up_costs_nobody_else_anything(last: int, often: bool, tmp_path: Path) -> None:
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", *GO_ON, sites=HOSPITALS)
    hospitals = Hospitals(plan, tmp_path / "run")
    honest_answer = hospitals.script

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        found = honest_answer(site, asked, work)
        letters = asked.facts.get("sealing", {})
        if site == "d" and asked.facts["task"] == "agree" and not isinstance(found, Missing):
            number = letters["agreement"]["number"] + last if often else last
            found[0][1].facts["sealing"] = {"last": number}
        return found

    hospitals.script = script
    server = lead(plan, tmp_path / "run", hospitals)
    assert [line.answered for line in server.rounds] == [["a", "b", "c"]] * plan.rounds


def test_a_server_that_goes_back_to_keys_of_an_earlier_agreement(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", sites=HOSPITALS)
    first, second = (Hospitals(plan, tmp_path / "run") for _ in range(2))
    lead(plan, tmp_path / "run", first)
    lead(plan, tmp_path / "run", second, resume=True)
    for site, asked in first.sent:
        if asked.facts["task"] in ("offer", "confirm", "unmask"):
            with pytest.raises(MedsiloError, match="the server: it goes back to agreement 1; the last is 2"):
                second.participants[site].answer(asked)


# -------------------------------------------------------------------------------------- other models to other hospitals
def zeros(asked: Parcel) -> Parcel:
    """Return an order with zeros in place of the model."""
    empty = {name: torch.zeros_like(tensor) for name, tensor in asked.groups["model"].items()}
    return replace(asked, groups={**asked.groups, "model": empty})


def test_a_server_that_sends_zeros_to_all_hospitals_but_one(liar: type[Liar], tmp_path: Path) -> None:
    """Their updates are known or small, so the sum would be the model of the one that was given the true weights."""
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", sites=HOSPITALS)

    def lie(site: str, asked: Parcel) -> Parcel:
        return zeros(asked) if (asked.facts["task"], asked.facts["round"]) == ("round", 2) and site != "d" else asked

    hospitals = Hospitals(plan, tmp_path / "run", lie)
    with pytest.raises(ParticipationError, match="only 1 sites have confirmed the sum in round 2"):
        lead(plan, tmp_path / "run", hospitals)
    assert len(liar.opened) == 1  # that of round 1: nothing of round 2 opens


def test_a_server_that_sends_other_models_as_sums_that_were_sealed(
    liar: type[Liar], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Masks do not depend on what comes sealed, and the server may write words without masks."""
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", sites=HOSPITALS)
    first = dict[str, bytes]()

    def given(server: Liar, phase: Phase) -> bytes:
        return first.setdefault("given", SealedServer._given(server, phase))  # what round 1 had, in all rounds

    monkeypatch.setattr(liar, "_given", given, raising=False)

    def lie(site: str, asked: Parcel) -> Parcel:
        if (asked.facts["task"], asked.facts["round"]) != ("round", 2):
            return asked
        model = asked.groups["model"] if site == "d" else zeros(asked).groups["model"]
        envelope = hospitals.participants[site].participant.envelope
        (own,) = envelope._sealed(envelope._seat(1), plan.course.phases[0], 2).values()
        (block,) = own.blocks.values()
        floats = {name: tensor for name, tensor in model.items() if tensor.is_floating_point()}
        words = as_tensor(block.flat.encode(floats, block.fixed, 1))
        note = envelope.memory.notes[1]
        claim = {"round": 1, "context": note.context.hex(), "sites": HOSPITALS}
        held = {"model": {"agreement": 1, "claim": claim}}
        beside = {name: model[name] for name in own.beside}
        sealing = {**asked.facts["sealing"], "held": held}
        return Parcel({**asked.groups, "model": {WORDS: words, **beside}}, {**asked.facts, "sealing": sealing})

    hospitals = Hospitals(plan, tmp_path / "run", lie)
    with pytest.raises(ParticipationError):
        lead(plan, tmp_path / "run", hospitals)
    assert len(liar.opened) == 1 and sorted(hospitals.said) == HOSPITALS
    assert all("it sends a sealed group that is none of the plan's" in said for said in hospitals.said.values())


@pytest.mark.parametrize("replays", [False, True])
def test_a_server_that_sends_other_means_of_personal_models(replays: bool, liar: type[Liar], tmp_path: Path) -> None:
    """SoftPull. It sends zeros to all but d; or leaves d out of a round, and sends it an older mean than the others."""
    plan = make_plan("fedsm", *RULES, "transport.sealing=pairwise", *GO_ON, sites=HOSPITALS)
    older = dict[str, Parcel]()

    def lie(site: str, asked: Parcel) -> Parcel | Missing:
        task, number = asked.facts["task"], asked.facts["round"]
        if replays and number == 2:
            older[task] = asked
            return LOST if site == "d" else asked
        if (task, number) != ("round", 3 if replays else 2) or (site == "d") != replays:
            return asked
        before = older["round"] if replays else asked
        held = {**asked.facts["sealing"], "held": before.facts["sealing"]["held"]}
        personal = before.groups["personal"]
        told = personal if replays else {name: torch.zeros_like(tensor) for name, tensor in personal.items()}
        return Parcel({**asked.groups, "personal": told}, {**asked.facts, "sealing": held})

    hospitals = Hospitals(plan, tmp_path / "run", lie)
    with pytest.raises(MedsiloError, match="only 1 sites have confirmed the sum in round 2|a sum does not open"):
        lead(plan, tmp_path / "run", hospitals)
    rounds = [sites for sites, *_ in liar.opened]  # three means of each round before; nothing of this one opens
    assert rounds == [("a", "b", "c", "d")] * 3 + [("a", "b", "c")] * 3 * replays


@pytest.mark.parametrize("kind", ["type", "lacking", "hospitals", "round"])
def test_a_mean_of_personal_models_that_is_none_is_refused(kind: str, liar: type[Liar], tmp_path: Path) -> None:
    plan = make_plan("fedsm", *RULES, "transport.sealing=pairwise", sites=HOSPITALS)

    def lie(site: str, asked: Parcel) -> Parcel:
        if (asked.facts["task"], asked.facts["round"]) != ("round", 2):
            return asked
        mean, letters = dict(asked.groups["personal"]), asked.facts["sealing"]
        first, held = min(mean), letters["held"]["personal"]
        if kind == "lacking":
            mean.pop(first)
        elif kind == "type":
            mean[first] = mean[first].long()
        else:
            claim = {**held["claim"], **({"sites": ["a"]} if kind == "hospitals" else {"round": 10_000_000})}
            held = {**held, "claim": claim}
        letters = {**letters, "held": {**letters["held"], "personal": held}}
        return Parcel({**asked.groups, "personal": mean}, {**asked.facts, "sealing": letters})

    hospitals = Hospitals(plan, tmp_path / "run", lie)
    with pytest.raises(MedsiloError):
        lead(plan, tmp_path / "run", hospitals)
    assert [sites for sites, *_ in liar.opened] == [tuple(HOSPITALS)] * 3  # round 1 alone


def test_what_such_a_server_can_compute_itself() -> None:
    """It has those confirm that it told the same, and takes each hospital's own mask off with the context that this
    one was in."""
    study, models = sealed.Hospitals(sealed.terms(4)), sealed.numbers(4, 300_000)
    block, groups = sealed.block(models, weights=(1,) * 4), sealed.as_groups(models)
    servers = [MaskedSums(study.terms, study.assembly, 1, [block], given) for given in (b"0" * 32, b"1" * 32)]
    for site, member in study.members.items():
        offer = member.offer(1)
        for server in servers:
            server.offer(site, offer)
    deals, _ = (server.deals() for server in servers)
    true = servers[0]
    for site, deal in deals.items():
        given = servers[site == "site-3"].given
        true.add(site, study.members[site].seal(deal, [block], groups[site], given=given))
    alike = [site for site in true.survivors().sites if site != "site-3"]
    request = study.request(true, alike)
    for site in alike:
        true.reveal(site, study.members[site].unmask(request, [block]))
    words = as_words("the server", true.open()[1]["model"], block.flat.words).copy()
    seed = true._secret("site-3", True)
    add_streams(words, [own_mask(seed, true._context, block, 1), own_mask(seed, servers[1]._context, block, -1)])
    best = torch.from_numpy(words[:300_000].view("<i8").astype("f8"))
    assert max(sealed.correlation(best, models[site]["a"]) for site in models) < 0.01


def test_a_server_that_begins_with_crafted_weights(liar: type[Liar], tmp_path: Path) -> None:
    """A first layer made for it shows single patients in its gradient, in a sum of a few hospitals, too."""
    plan = make_plan("fedavg", *RULES, "transport.sealing=pairwise", sites=HOSPITALS)
    hospitals = Hospitals(
        plan, tmp_path / "run", lambda site, asked: zeros(asked) if "model" in asked.groups else asked
    )
    with pytest.raises(ParticipationError):
        lead(plan, tmp_path / "run", hospitals)
    assert not liar.opened and sorted(hospitals.said) == HOSPITALS
    assert all(
        "in round 1 it sends other weights of model than the plan begins with" in s for s in hospitals.said.values()
    )


def test_a_hospital_that_comes_late_is_in_the_next_sum(tmp_path: Path) -> None:
    """It has not seen the first weights, and its masks cancel: of means, of rows, with a group that is sent once."""
    for method in ("fedavg", "adafed", "fedsm"):
        plan = make_plan(method, *RULES, "transport.sealing=pairwise", *GO_ON, sites=HOSPITALS)

        def away(site: str, asked: Parcel) -> Parcel | Missing:
            return LOST if site == "d" and asked.facts["round"] in (1, 2) else asked

        server = lead(plan, tmp_path / method, Hospitals(plan, tmp_path / method, away))
        assert [("d" in line.answered) for line in server.rounds[:3]] == [False, False, True], method
