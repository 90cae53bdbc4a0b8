"""Groups of hospitals: means are taken within each first, in whole studies."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nvflare.fuel.f3.streaming.download_service import ProduceRC

from medsilo.check.leaks import describe
from medsilo.check.visit import Visit, check
from medsilo.core.errors import MedsiloError, ParticipationError, PlanError, Refused
from medsilo.core.files import load_tensors
from medsilo.federation import inprocess
from medsilo.federation.adding import GroupAdder
from medsilo.federation.asking import Missing
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.limits import check_adder
from medsilo.federation.participant import Participant
from medsilo.flare import pieces
from medsilo.flare.pieces import Readers
from medsilo.runs.messages import HeldTensors, Parcel, Request
from medsilo.runs.paths import LAST
from medsilo.runs.record import Record
from medsilo.site.settings import SiteSettings
from tests.conftest import SITES, make_plan

A, B, C = SITES
CPU = SiteSettings(device="cpu")
SMALL = [
    "task.persons=6",
    "task.windows=6",
    "task.steps=32",
    "training.batch_size=8",
    "training.rounds=1",
    "tracking.select=last",
]
GROUPS = f"participation.groups={{south: [{A}, {C}], north: [{B}]}}"


def models(*changes):
    run = inprocess.run(make_plan("fedadam", *SMALL, *changes), settings=CPU)
    return {name: tensor for name, tensor in run.models[A].state_dict().items() if tensor.is_floating_point()}


def test_a_study_takes_its_means_within_groups_first():
    flat, grouped = models(), models(GROUPS)
    assert not all(torch.equal(tensor, flat[name]) for name, tensor in grouped.items())
    for name, tensor in grouped.items():
        torch.testing.assert_close(tensor, flat[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("local", [], "takes no mean over sites"),
        ("adafed", [], "takes no mean over sites"),
        ("fedawa", [], "needs every site's tensors at once"),
        ("fedavg", ["mixing.share_cap=0.9"], "robust rules and shares"),
        ("fedavg", ["transport.sealing=pairwise"], "sealed numbers are integers"),
    ],
)
def test_what_has_no_mean_in_parts_is_refused(method, changes, said):
    with pytest.raises(PlanError, match=f"participation.groups: .*{said}"):
        make_plan(method, GROUPS, *changes)


def test_sites_may_be_left_out_where_groups_name_them():
    plan = make_plan("fedsm", GROUPS, "participation.sites=[]")
    assert plan.participation.sites == tuple(SITES)
    assert plan.participation.groups == {"north": (B,), "south": (A, C)}
    assert plan.hash == make_plan("fedsm", GROUPS).hash != make_plan("fedsm").hash


# -- a site of the group adds up ------------------------------------------------------------------------------------

SUMS = [*SMALL, GROUPS, f"participation.sums_at={{south: {C}}}"]
GO_ON = ["participation.when_missing=continue", "participation.minimum=1"]
Change = Callable[[Parcel], Parcel]


class Holding(inprocess.Loop):
    """Keeps what sites send in a round until the one that adds up fetches it; both may be changed on the way."""

    def __init__(self, participants, held: Change, added: Change, gone: Collection[str], silent: Collection[str]):
        super().__init__(participants)
        self.silent, self.asked = silent, Counter()  # who answers nothing, and how often each was asked
        self.left, self.kept, self.held, self.added, self.gone = set(), {}, held, added, gone
        self.came: list[tuple[str, str]] = []  # the task and the site of what reached the server with tensors

    def leave(self, sites):
        self.left = set(sites)

    def bring(self, site, held, expected):
        assert held.place == site
        if site in self.gone:
            raise MedsiloError("it is gone")
        return self.kept[site]

    def ask(self, sites, outgoing, receive, timeout):
        missing = {}
        for site in sites:
            request = outgoing(site)
            self.asked[site] += 1
            if site in self.silent:
                missing[site] = Missing("lost", "no answer within 9 s")
                continue
            try:
                receive(site, self.answer(site, request))
            except MedsiloError as error:
                missing[site] = Missing.refused(error)
        return missing

    def answer(self, site, request):
        own = self.participants[site]
        if request.facts["task"] == "sum":
            adder = GroupAdder(own.plan, site, request.facts["study"])
            reply = self.added(adder.answer(Request.read(request.facts), self.bring, lambda: None))
        else:
            reply = own.answer(request)
        if site in self.left:
            reply = self.held(reply) if site == A else reply
            self.kept[site] = reply.groups
            items = {group: dict.fromkeys(named, "T0") for group, named in reply.groups.items()}
            reply = replace(reply, groups={}, held=HeldTensors(place=site, key="k", items=items))
        if reply.groups:
            self.came.append((request.facts["task"], site))
        return reply


def study(
    folder: Path,
    *changes: str,
    method: str = "fedadam",
    held: Change = lambda own: own,
    added: Change = lambda own: own,
    gone: Collection[str] = (),
    silent: Collection[str] = (),
):
    plan = make_plan(method, *SUMS, *changes)
    sites = {site: Participant(plan, site, SITES, CPU, folder / "sites" / site) for site in SITES}
    loop = Holding(sites, held, added, gone, silent)
    coordinator = Coordinator(plan, SITES, loop, Record(folder), "scripted", settings=CPU, leave=loop.leave)
    coordinator.run()
    return coordinator, loop


@pytest.mark.parametrize(
    ("method", "precision"), [("scaffold", "float32"), ("fedadam", "bfloat16"), ("fedrdn", "float32")]
)
def test_a_sum_made_by_a_site_has_the_same_bits(method, precision, tmp_path):
    changes = [f"transport.precision={precision}"]
    coordinator, loop = study(tmp_path, *changes, method=method)
    assert loop.came == [("round", B), ("sum", C)] * len(coordinator.rounds)
    run = inprocess.run(make_plan(method, *SUMS, *changes), folder=tmp_path / "loop", settings=CPU)
    made, wanted = (load_tensors(folder / LAST)[0] for folder in (tmp_path / "sites" / B, tmp_path / "loop/sites" / B))
    assert made.keys() == wanted.keys() and all(torch.equal(tensor, wanted[name]) for name, tensor in made.items())
    assert [site.share for site in coordinator.rounds[0].sites.values()] == [
        site.share for site in run.history[0].sites.values()
    ]


def poisoned(reply: Parcel) -> Parcel:
    def of(own: torch.Tensor) -> torch.Tensor:
        return own * torch.nan if own.is_floating_point() else own

    groups = {group: {name: of(own) for name, own in named.items()} for group, named in reply.groups.items()}
    return replace(reply, groups=groups)


def test_a_member_whose_tensors_are_wrong_or_gone_is_missing_and_the_others_count(tmp_path):
    coordinator, _ = study(tmp_path / "nan", *GO_ON, held=poisoned)
    line = coordinator.rounds[0]
    assert line.answered == [B, C] and "NaN or infinity" in line.refused[A] and C in line.refused[A]
    coordinator, _ = study(tmp_path / "gone", *GO_ON, gone={A})
    line = coordinator.rounds[0]
    assert line.answered == [B, C] and "it is gone" in line.lost[A]


def test_a_site_that_adds_up_and_is_silent_is_waited_for_once_a_round(tmp_path):
    coordinator, loop = study(tmp_path, *GO_ON, silent={C})
    for line in coordinator.rounds:
        assert line.answered == [B] and line.lost[C] == "no answer within 9 s"
        assert line.lost[A] == f"{C}, which adds up its group, gave no mean: no answer within 9 s"
    assert loop.asked[C] == loop.asked[B] > len(coordinator.rounds)


LIES = [
    ("its group", lambda own: replace(own, facts={**own.facts, "sites": [C]})),
    ("cases of the sites", lambda own: replace(own, facts={**own.facts, "samples": own.facts["samples"] + 1})),
    ("not the sum 1 of this", lambda own: replace(own, facts={**own.facts, "round": 9})),
    ("NaN or infinity", poisoned),
    ("groups: lacks buffers, model", lambda own: replace(own, groups={})),
    ("its answer lacks lost", lambda own: replace(own, facts={k: v for k, v in own.facts.items() if k != "lost"})),
]


@pytest.mark.parametrize(("said", "lie"), LIES, ids=lambda part: part if isinstance(part, str) else "")
def test_a_wrong_sum_costs_its_group_the_round(said, lie, tmp_path):
    coordinator, _ = study(tmp_path, *GO_ON, added=lie)
    line = coordinator.rounds[0]
    assert line.answered == [B] and said in line.refused[A] and said in line.refused[C]
    with pytest.raises(ParticipationError, match=said):
        study(tmp_path / "stop", added=lie)


def test_a_hospital_says_who_may_read_what_it_sends(tmp_path):
    plan, real = make_plan("fedavg", *SUMS), make_plan("fedavg", *SUMS)
    check_adder(plan, A, SiteSettings())  # the data are synthetic
    with pytest.raises(Refused, match=f"the plan lets {C} read what this hospital sends"):
        check_adder(real, A, SiteSettings(sums_at=()))
    check_adder(real, C, SiteSettings(sums_at=()))
    check_adder(real, A, SiteSettings(sums_at=(C,)))
    with pytest.raises(Refused, match="sums_at in its medsilo.yaml"):
        Participant(plan, A, SITES, SiteSettings(device="cpu", sums_at=(B,)), tmp_path / "site")
    assert any(f"{C} reads the tensors of {A}, and" in line for line in describe(plan, {}, SiteSettings()))
    for allowed, verdict in ((B, "stops"), (C, "note")):
        (tmp_path / "medsilo.yaml").write_text(f"device: cpu\nsums_at: [{allowed}]\n")
        found = check(Visit(A, plan, local=tmp_path, required={}), lambda *asked: []).findings
        assert [own.severity for own in found if "reads what this" in own.what or "lets" in own.what] == [verdict]


def test_only_the_server_and_who_adds_up_may_fetch(monkeypatch):
    readers = Readers()
    assert readers.lets("city.hospital-x.job")
    readers.only(C)
    assert readers.lets("server.job") and readers.lets(f"country.city.{C}.job") and readers.lets(f"{C}.job")
    assert not any(readers.lets(name) for name in (f"{A}.job", f"{C}.x.job", f"x{C}.job", C, "job", "", f"{C}."[:-1]))
    monkeypatch.setattr(pieces, "READERS", readers)
    ready = pieces.PiecedTensors().to_downloadable({"T0": torch.ones(3)}, 100, {})
    with pytest.raises(Refused, match="for the server"):
        ready.produce({}, f"{A}.job")
    assert ready.produce({}, f"{C}.job")[0] == ProduceRC.OK
    left = pieces.PiecedTensors().to_downloadable({"T0": torch.ones(3)}, 100, {})
    pieces.let_go()
    with pytest.raises(RuntimeError, match="released"):
        left.produce({}, f"{C}.job")


@pytest.mark.parametrize("method", ["fedsm", "fednova", "ditto"])
def test_what_the_server_needs_of_every_site_can_not_be_added_up_elsewhere(method):
    if method == "ditto":  # its personal models never leave
        assert make_plan(method, *SUMS)
        return
    with pytest.raises(PlanError, match=r"participation.sums_at: the server needs every site's own"):
        make_plan(method, *SUMS)
