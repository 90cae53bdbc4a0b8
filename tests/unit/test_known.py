"""Tensors that a site has are not sent again: the same in the end, and only bytes that were needed on the line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.private.privacy_manager import Scope

from medsilo.core.errors import Aborted, Died, Lacks, MedsiloError, Refused
from medsilo.core.files import load_tensors
from medsilo.core.tensors import Groups
from medsilo.federation.around import TrainingSite
from medsilo.federation.kept_answer import digest_of
from medsilo.federation.known import SMALLEST, KnownTensors, ReceivedTensors, mark_of
from medsilo.federation.seams import Missing
from medsilo.flare.executor import _changes_answers
from medsilo.flare.filters import OnlyTheseGroups
from medsilo.flare.wire import held_of, refusal, to_parcel
from medsilo.plan import Plan
from medsilo.runs.messages import Parcel
from medsilo.runs.paths import RECEIVED
from tests.conftest import SITES, make_plan
from tests.unit.test_coordinator import SMALL, Answers, Study, assert_equal

A, B, C = SITES
FROZEN = {"0.0.weight": 5184, "1.0.weight": 18432}  # bytes
NOBODY: Any = None  # behind a layer that is looked at alone
LARGE = {*FROZEN, "4.weight"}  # that may be named


class KeepingSite:
    """A site behind a line, as the executor makes one."""

    def __init__(self, site: TrainingSite) -> None:
        sealed = site.participant.place.plan.transport.sealed
        self.received = ReceivedTensors(site, site.folder, lambda: not sealed)

    def answer(self, order: Parcel) -> Parcel:
        return self.received.answer(order, lambda: None)


def keeping(study: Study) -> Study:
    study.transport.participants = {site: KeepingSite(own) for site, own in study.participants.items()}
    return study


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two layers of every network that do not learn."""
    build = Plan.build_networks

    def built(plan: Plan) -> Any:
        networks = build(plan)
        for network in networks.values():
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(name not in FROZEN)
        return networks

    monkeypatch.setattr(Plan, "build_networks", built)
    yield


def sent(study: Study, task: str = "round") -> list[tuple[str, int, set[str]]]:
    """Return to whom which large tensors of the model went in which round."""
    return [
        (site, order.facts["round"], {name for name in order.groups.get("model", {}) if name in LARGE})
        for site, order in study.transport.sent
        if order.facts["task"] == task
    ]


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedsm", marks=pytest.mark.slow)])
def test_what_does_not_learn_is_sent_once_and_never_comes_back(method: str, tmp_path: Path) -> None:
    plan = make_plan(method, *SMALL, "training.rounds=3")
    bare, kept = Study(plan, tmp_path / "bare"), keeping(Study(plan, tmp_path / "kept"))
    bare.run()
    kept.run()
    for site in SITES:
        assert_equal(*(study.model(f"sites/{site}/last") for study in (bare, kept)))
    states = [load_tensors(study.folder / "checkpoints/round-3.safetensors")[0] for study in (bare, kept)]
    assert_equal(*states)
    groups = next(order.groups for _, order in kept.transport.sent if order.facts["task"] == "round")
    twins = sum(name in FROZEN for tensors in groups.values() for name in tensors) // len(FROZEN)  # of these networks
    less = twins * sum(FROZEN.values())
    for before, after in zip(bare.rounds, kept.rounds, strict=True):
        for site in SITES:
            again = 0 if after.round == 1 else less
            spared = before.sites[site].bytes_up - after.sites[site].bytes_up
            spared_down = before.sites[site].bytes_down - after.sites[site].bytes_down
            assert (spared, spared_down) == (less, again) or (
                method == "fedsm" and spared >= less <= spared_down + less
            )
            assert after.sites[site].updates == before.sites[site].updates


def test_a_study_that_goes_on_sends_no_model_that_is_there(tmp_path: Path) -> None:
    """The server is killed in round 2, when its orders have gone out; another process goes on at both ends."""
    plan = make_plan("fedavg", *SMALL)

    def killed(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        reply = work()
        if site == C and asked.facts["round"] == 2:
            raise Aborted("the server was killed")
        return [(site, reply)]

    with pytest.raises(Aborted):
        keeping(Study(plan, tmp_path / "run", killed)).run()
    again = keeping(Study(plan, tmp_path / "run"))
    again.coordinator.run(resume=True)
    assert sent(again) == [(site, 2, set()) for site in SITES]
    whole = Study(plan, tmp_path / "whole")
    whole.run()
    assert_equal(again.model("global/last"), whole.model("global/last"))


def test_an_order_after_a_refusal_names_the_model(tmp_path: Path) -> None:
    """Under stop, a site whose trainer died is asked once more."""
    study = keeping(Study(make_plan("fedavg", *SMALL), tmp_path / "run"))
    died: list[int] = []

    def once(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if site == B and asked.facts["task"] == "round" and asked.facts["round"] not in died:
            died.append(asked.facts["round"])
            own = study.transport.participants[B].received
            own.open(asked)
            said = refusal("the training process died", died=True, holds=own.holds)
            with pytest.raises(Died) as caught:
                to_parcel(said)
            return Missing.refused(caught.value, held_of(said))
        return [(site, work())]

    study.transport.script = once
    study.run()
    to_b = [(number, names) for site, number, names in sent(study) if site == B]
    assert to_b == [(1, LARGE), (1, set()), (2, LARGE), (2, set())]
    small = study.rounds[0].sites
    assert small[B].bytes_down == small[A].bytes_down - sum(FROZEN.values()) - 8192


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("harm", ["removed", "changed", "shortened"])
def test_a_copy_that_is_lost_is_sent_again_and_costs_no_round(harm: str, tmp_path: Path) -> None:
    study = keeping(Study(make_plan("fedavg", *SMALL), tmp_path / "run"))

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if (site, asked.facts["task"], asked.facts["round"]) == (B, "round", 2) and "1.0.weight" in str(asked.facts):
            for path in (study.folder / "sites" / B / RECEIVED).iterdir():
                content = path.read_bytes()
                changed = {"changed": b"x" + content[1:], "shortened": content[:-4]}.get(harm)
                path.unlink() if changed is None else path.write_bytes(changed)
        try:
            return [(site, work())]
        except Lacks as error:
            return Missing.refused(error)

    study.transport.script = script
    study.run()
    assert [names for site, number, names in sent(study) if (site, number) == (B, 2)] == [{"4.weight"}, LARGE]
    assert study.rounds[1].answered == SITES and study.transport.pauses == []


# ------------------------------------------------------------------------------------------------- nobody is believed
def test_a_site_that_claims_what_it_lacks_harms_only_itself(tmp_path: Path) -> None:
    """It says that it holds the model before it ever got it: it finds nothing but marks in its order."""
    going_on = ["participation.when_missing=continue", "participation.minimum=2"]
    study = keeping(Study(make_plan("fedavg", *SMALL, *going_on), tmp_path / "run"))
    model = make_plan("fedavg", *SMALL).build_networks()["model"].state_dict()
    next_one = {name: mark_of(tensor) for name, tensor in model.items() if name in LARGE}

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if site == C and asked.facts["task"] == "round":
            return Missing.refused(Lacks("it is not here"))
        reply = work()
        if site == C and asked.facts["task"] == "join":
            reply.facts["holds"] = {"model": next_one}
        return [(site, reply)]

    study.transport.script = script
    study.run()
    to_c = [(number, names) for site, number, names in sent(study) if site == C]
    assert to_c == [(1, set()), (1, LARGE), (2, LARGE), (2, LARGE)]  # asked once more each time, then no more
    assert [line.answered for line in study.rounds] == [[A, B], [A, B]]


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "never told": ({"same": {"model": ["6.weight"]}}, "it names model/6.weight, which it was not given"),
    "no group": ({"same": {"head": ["6.weight"]}}, "it names head/6.weight, which it was not given"),
    "sent, too": ({"same": {"model": ["4.weight"]}}, "it names model/4.weight and sends it, or names it twice"),
    "no text": ({"same": {"model": [7]}}, "its same.model.0: 7 is not a text"),
    "no mark": ({"holds": {"model": {"4.weight": "x" * 80}}}, "its holds.model.4.weight: "),
    "too much": ({"holds": {"model": {str(n): "0" * 80 for n in range(2001)}}}, "its holds.model is too long"),
    "no mapping": ({"holds": [1]}, "its holds: "),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_names_wrongly_is_refused(lie: str, tmp_path: Path) -> None:
    told, reason = LIES[lie]
    going_on = ["participation.when_missing=continue", "participation.minimum=2", "training.rounds=1"]
    study = keeping(Study(make_plan("fedavg", *SMALL, *going_on), tmp_path / "run"))

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        reply = work()
        if site == C and asked.facts["task"] == "round":
            reply.facts.update(told)
        return [(site, reply)]

    study.transport.script = script
    study.run()
    assert reason in study.rounds[0].refused[C]
    assert study.rounds[0].answered == [A, B]


# ---------------------------------------------------------------------------------------------------- the parts
def order_of(groups: Groups, marks: dict[str, dict[str, str]]) -> Parcel:
    return Parcel(groups, {"task": "round", "round": 1, **({"marks": marks} if marks else {})})


def test_a_shortened_order_is_filled_to_the_same_bits(tmp_path: Path) -> None:
    """Whatever its types, and so that the ledger knows it for the same request."""
    torch.manual_seed(0)
    whole: Groups = {
        "model": {
            "floats": torch.randn(40, 64),
            "halves": torch.randn(4096).bfloat16(),
            "counts": torch.arange(1024),
            "truths": torch.randn(5000) > 0,
            "scalar": torch.tensor(3.0),
            "empty": torch.empty(0, 4),
            "odd": torch.full((2048,), -0.0).index_fill(0, torch.tensor([5]), float("nan")),
        },
        "personal": {"floats": torch.randn(40, 64), "short": torch.randn(SMALLEST // 4 - 1)},
    }
    server = KnownTensors(NOBODY)
    assert server.shorten(A, whole) == (whole, {})  # nothing is known of a site that says nothing
    server.confirm(A, {})
    first, marks = server.shorten(A, whole)
    assert first == whole and sorted(marks["model"]) == ["counts", "floats", "halves", "odd", "truths"]
    ReceivedTensors(NOBODY, tmp_path).open(order_of(first, marks))
    site = ReceivedTensors(NOBODY, tmp_path)  # another process
    server.confirm(A, site.holds)
    second, marks = server.shorten(A, whole)
    assert {group: sorted(own) for group, own in second.items()} == {
        "model": ["empty", "scalar"],
        "personal": ["short"],
    }
    filled = site.open(order_of(second, marks))
    assert filled.facts == {"task": "round", "round": 1}
    assert digest_of(filled) == digest_of(order_of(whole, {}))
    changed = {**whole, "model": {**whole["model"], "odd": torch.zeros(2048)}}  # of another sign, and a number
    assert "odd" in server.shorten(A, changed)[0]["model"]

    answer = Parcel({"model": {**changed["model"], "floats": whole["model"]["floats"].clone()}}, {"task": "round"})
    leaves = site.close(answer, names=True)
    assert leaves.facts["same"] == {"model": ["counts", "floats", "halves", "truths"]}
    assert server.whole(A, leaves.groups, leaves.facts["same"], whole)["model"].keys() == whole["model"].keys()
    with pytest.raises(Refused, match="names model/counts"):
        KnownTensors(NOBODY, sealed=True).whole(A, leaves.groups, leaves.facts["same"], whole)
    with pytest.raises(Refused, match="names model/counts"):  # that is of the order to another site
        server.whole(B, leaves.groups, leaves.facts["same"], whole)


def test_what_a_filter_has_changed_on_its_way_is_not_taken_for_the_servers(tmp_path: Path) -> None:
    """A quantised model is not the server's: it is neither named by the server nor by the site."""
    server, site = KnownTensors(NOBODY), ReceivedTensors(NOBODY, tmp_path)
    whole: Groups = {"model": {"w": torch.randn(64, 64)}}
    server.confirm(A, {})
    sent, marks = server.shorten(A, whole)
    coarse = {"model": {"w": sent["model"]["w"].half().float()}}
    came = site.open(order_of(coarse, marks))
    leaves = site.close(Parcel(came.groups, {}), names=True)
    assert "same" not in leaves.facts and leaves.groups == coarse
    server.confirm(A, leaves.facts["holds"])
    assert server.shorten(A, whole)[0] == whole


def test_a_tensor_is_hashed_once_for_all_sites_and_not_where_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    monkeypatch.setattr("medsilo.federation.known.mark_of", lambda tensor: hashed.append(1) or mark_of(tensor))
    server = KnownTensors(NOBODY)
    common = {"model": {"w": torch.randn(2048), "v": torch.randn(2048)}}
    for site in SITES:
        server.confirm(site, {})
        held = server.shorten(site, common)[1]
        server.confirm(site, held)
    assert len(hashed) == 2
    for site in SITES:
        server.shorten(site, {"model": {"w": common["model"]["w"], "v": torch.randn(2048)}})
    assert len(hashed) == 2


def test_a_disk_that_does_not_take_copies_costs_bytes_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, text: str) -> None:
        raise MedsiloError("index.json could not be written: the disk is full")

    site, whole = ReceivedTensors(NOBODY, tmp_path), {"model": {"w": torch.randn(64, 64)}}
    monkeypatch.setattr("medsilo.federation.known.write_text", full)
    came = site.open(order_of(whole, {"model": {"w": mark_of(whole["model"]["w"])}}))
    assert site.holds == {} and not (tmp_path / RECEIVED).exists()
    assert site.close(Parcel(came.groups, {}), names=True).facts == {"holds": {}, "same": {"model": ["w"]}}


def test_a_hospital_with_a_filter_names_nothing() -> None:
    """Its filter sees all that leaves."""
    context, scope = FLContext(), Scope()
    assert _changes_answers(context)  # nothing is known of the filters
    context.set_prop(FLContextKey.RUNNER, SimpleNamespace(task_result_filters={}), private=True)
    context.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True)
    assert not _changes_answers(context)
    scope.add_task_result_filter(OnlyTheseGroups(["model"]), "out")
    assert _changes_answers(context)
