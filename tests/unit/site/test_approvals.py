"""A hospital runs a study only with an approval signed by the hospital's own key, whatever the server requests."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.job_launcher_spec import JobLauncherSpec, add_launcher
from nvflare.apis.workspace import Workspace
from nvflare.private.event import fire_event
from nvflare.private.fed.utils.fed_utils import get_job_launcher

from medsilo.check.approval import changes_since
from medsilo.check.hospital_checks import KitAtHome
from medsilo.cli import main
from medsilo.cli.options import settings_of
from medsilo.core.errors import MedsiloError, Refused, TemporaryRefusal
from medsilo.core.package import ENGINE, facts_of
from medsilo.federation.permission import Permission
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import DisclosingSite, training_site
from medsilo.flare.kit_events import HospitalEvents
from medsilo.plan import Plan, parse_plan
from medsilo.runs.event_reading import read
from medsilo.runs.messages import StudyMessage
from medsilo.site.accepted_settings import REMEMBERED, AcceptedSettings
from medsilo.site.approvals import (
    MOST_ASKED,
    MOST_ROUNDS,
    ApprovalLimits,
    Approvals,
    ApprovedPackage,
    AskingPlan,
    Decision,
    approvals_of,
)
from medsilo.site.kit import BEFORE, KitFiles
from medsilo.site.ledger import CountedStudy, ledger_of
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings
from medsilo.site.signing import UseKey
from medsilo.tasks.sources import DataSource
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.unit.federation.test_participant import SMALL, Server
from tests.unit.medsilo_secagg.test_sealed_identity import certificate, fresh, pem, root
from tests.unit.site.test_ledger import ONE

A, B = SITES[:2]
WANTED = SiteSettings(device="cpu", approval="required")


def make_kit(folder: Path, site: str) -> KitFiles:
    startup, key, (above, signs) = folder / "startup", fresh(), root()
    startup.mkdir(parents=True)
    (folder / "local").mkdir()
    (folder / "local/medsilo.yaml").write_text("device: cpu\napproval: required\n")
    files = {"client.crt": certificate(site, key, "root", signs), "client.key": key, "rootCA.pem": above}
    for name, content in files.items():
        (startup / name).write_bytes(pem(content))
    names = {"ssl_cert": "client.crt", "ssl_private_key": "client.key", "ssl_root_cert": "rootCA.pem"}
    client = {"fqsn": site, **names}
    described = {"client": client, "servers": [{"identity": "localhost", "service": {"target": "localhost:8002"}}]}
    (startup / "fed_client.json").write_text(json.dumps(described))
    return KitFiles(*(str(startup / name) for name in files))


class Home:
    def __init__(self, folder: Path, site: str = A) -> None:
        self.folder, self.kit = folder, make_kit(folder, site)
        self.plan = make_plan("fedavg", *SMALL, "training.rounds=4")
        self.place = folder / "medsilo/study/sites" / site
        self.approvals = approvals_of(QueryBudget(folder / "medsilo/_hospital" / site), self.kit, WANTED)

    def approve(self, **limits: Any) -> None:
        told = ApprovalLimits.from_values(limits, "the limits")
        self.approvals.decide(self.plan.hash, "approved", "engineer", told, self.plan.code)

    def permission(self, plan: Plan | None = None, **given: Any) -> Permission:
        settings = WANTED.model_copy(update=given)
        return Permission(
            SiteContext(plan or self.plan, A, SITES, settings, self.place, "lead@clinic.example", self.kit)
        )

    def site(self) -> Permission:
        permission = self.permission()
        permission.check()
        permission.inner = training_site(permission.context)
        return permission


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "kit")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("signed") / "kit")
    home.approve(expires=int(time.time()) + 3600, rounds=3, sites=tuple(SITES))
    return home


def refused(home: Home, words: str, **given: Any) -> None:
    with pytest.raises(Refused, match=words):
        home.permission(**given).check()


# ---------------------------------------------------------------------------------------------------- code
class Launcher(JobLauncherSpec):  # type: ignore[misc]
    """Stand in for NVFlare's launcher, which starts the process of a job."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.BEFORE_JOB_LAUNCH:
            add_launcher(self, fl_ctx)  # type: ignore[no-untyped-call]

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> str:
        return "started"


@pytest.mark.parametrize("guard_first", [True, False])
@pytest.mark.parametrize(
    ("settings", "code", "told"),
    [
        ("approval: required", True, "this hospital approves plans.*brings code"),
        ("approval: except-canary", True, "brings code"),
        ("approval: [", True, "medsilo.yaml"),
        ("approval: required", False, ""),
        ("approval: none", True, ""),
    ],
)
def test_a_site_that_approves_plans_starts_no_job_with_code(
    guard_first: bool, settings: str, code: bool, told: str, tmp_path: Path
) -> None:
    """In earlier versions, a script ran without a hospital's approval if the job's sender was allowed to send code."""
    make_kit(tmp_path, A)
    (tmp_path / "local/medsilo.yaml").write_text(f"{settings}\n")
    parts: list[FLComponent] = [HospitalEvents(), Launcher()]
    parts = parts if guard_first else parts[::-1]
    fires = lambda event, fl_ctx: fire_event(event, parts, fl_ctx)  # noqa: E731
    engine = SimpleNamespace(fire_event=fires, get_workspace=lambda: Workspace(str(tmp_path), A))
    engine.new_context = FLContextManager(
        engine=engine, identity_name=A, public_stickers={}, private_stickers={}
    ).new_context
    context = engine.new_context()
    meta = {"name": "hello", **({AppValidationKey.BYOC: True} if code else {})}
    launcher = get_job_launcher(meta, context)
    if not told:
        assert launcher.launch_job(meta, context) == "started"
        return
    with pytest.raises(MedsiloError, match=told) as error:
        launcher.launch_job(meta, context)
    assert "\n" not in str(error.value)
    (line,) = read(tmp_path)
    assert "refused" in line and str(error.value) in line


# ---------------------------------------------------------------------------------------------------- a study
def test_a_study_runs_as_far_as_it_is_approved(home: Home) -> None:
    """The hospital approves a plan, withdraws its approval during training, and approves the plan again."""
    with pytest.raises(Refused) as error:
        home.site()
    assert str(error.value) == (
        f"this hospital has not approved plan {home.plan.hash[:12]}; its engineer decides there: "
        f"medsilo approve {home.plan.hash[:12]} --kit KIT"
    )
    [asked] = home.approvals.asked()
    assert (asked.hash, asked.study, asked.lead) == (home.plan.hash, "study", "lead@clinic.example")
    home.approve(rounds=2)
    site, server = home.site(), Server(home.plan)
    assert site.answer(server.ask("join", 0)).facts["task"] == "join"
    server.take(site.answer(server.ask("round", 1)))
    strangers = server.ask("round", 2)
    home.approve(rounds=2, sites=tuple(SITES))
    strangers.facts["sites"] = [*SITES, "stranger"]
    with pytest.raises(Refused, match="only for studies without stranger,"):
        site.answer(strangers)

    site._looked = float("-inf")
    batches: list[int] = []

    def withdraw_in_its_middle() -> None:
        batches.append(1)
        if len(batches) == 2:
            home.approvals.decide(home.plan.hash, "withdrawn", "engineer")
            site._looked = float("-inf")

    with pytest.raises(Refused, match="has withdrawn its approval of plan"):
        site.answer(server.ask("round", 2), withdraw_in_its_middle)
    assert len(batches) == 2
    home.approve(rounds=2)
    server.take(site.answer(server.ask("round", 2)))
    for task in ("round", "deliver"):
        with pytest.raises(Refused, match="approved at most 2 rounds of plan"):
            site.answer(server.ask(task, 3))


def test_what_is_withdrawn_at_the_last_moment_does_not_leave(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.approve()
    site, server = home.site(), Server(home.plan)
    made = DisclosingSite.answer

    def made_then_withdrawn(self: DisclosingSite, *given: Any) -> StudyMessage:
        reply = made(self, *given)
        home.approvals.decide(home.plan.hash, "withdrawn", "engineer")
        return reply

    monkeypatch.setattr(DisclosingSite, "answer", made_then_withdrawn)
    with pytest.raises(Refused, match="has withdrawn"):
        site.answer(server.ask("join", 0))


# ---------------------------------------------------------------------------------------------------- limits
def test_each_limit_holds(home: Home) -> None:
    home.approve(expires=int(time.time()) - 1)
    refused(home, "approved plan .* until .* UTC, and no longer")
    home.approve(sites=(A,))
    refused(home, f"only for studies without {', '.join(sorted(set(SITES) - {A}))},")
    home.approvals.decide(home.plan.hash, "declined", "engineer")
    refused(home, "has declined plan")
    refused(home, "has not approved plan", plan=make_plan("fedavg", *SMALL, "training.rounds=5"))
    home.approve(expires=int(time.time()) + 3600, rounds=4, sites=tuple(SITES))
    home.permission().check()
    with pytest.raises(MedsiloError, match="rounds: 0 is too small; give 1 or more"):
        ApprovalLimits.lasting(None, 0, "")


def test_a_decision_holds_up_to_its_limits_and_not_beyond() -> None:
    limits = ApprovalLimits(expires=100, rounds=3, sites=("a", "b"))
    code = {"medsilo": {"version": "1", "hash": "h"}}
    packages = {name: ApprovedPackage(**facts) for name, facts in code.items()}
    decision = Decision(plan="a" * 64, verdict="approved", at=0, by="x", limits=limits, packages=packages, data="m")
    asked: dict[str, Any] = {"named": ["b"], "sites": ["a", "b"], "number": 3, "code": code, "data": "m", "now": 99.9}
    assert decision.objection("this plan", **asked) == ""
    beyond: list[dict[str, Any]] = [
        {"now": 100.0},
        {"number": 4},
        {"named": []},
        {"named": ["b", "c"]},
        {"sites": ["a", "b", "0"]},
        *({"data": data} for data in ("a", "z", "")),
        *({"code": {"medsilo": {"version": "1", "hash": other}}} for other in ("a", "z")),
        {"code": {**code, "another": {"version": "1", "hash": "h"}}},
    ]
    for one in beyond:
        assert "this plan" in decision.objection("this plan", **{**asked, **one}), one
    # if a changed plan needs fewer packages, all code that runs is already approved
    assert decision.objection("this plan", **{**asked, "code": {}}) == ""
    lasting = ApprovalLimits.lasting(1000, None, " b, a,,b")
    assert lasting.expires and 0 <= time.time() + 3_600_000 - lasting.expires < 60
    assert (lasting.rounds, lasting.sites) == (None, ("a", "b"))


def test_only_what_is_approved_now_can_be_withdrawn(home: Home) -> None:
    for verdict in (None, "declined", "approved", "withdrawn"):
        if verdict == "approved":
            home.approve()
        elif verdict == "declined":
            home.approvals.decide(home.plan.hash, "declined", "engineer")
        with nullcontext() if verdict == "approved" else pytest.raises(MedsiloError, match="nothing to withdraw"):
            home.approvals.decide(home.plan.hash, "withdrawn", "engineer")
    assert [one.verdict for one in home.approvals.decisions()] == ["declined", "approved", "withdrawn"]


def test_who_takes_part_is_the_plans_word_and_not_the_servers(home: Home) -> None:
    """The hospital approved the sites in the server's list, but the plan lists more sites or no sites."""
    home.approve(sites=tuple(SITES[:2]))
    with pytest.raises(Refused, match=f"only for studies without {SITES[2]},"):
        home.permission().check(SITES[:2], 1)
    values = home.plan.resolved()
    values["participation"] |= {"sites": [], "minimum": 2}
    nobody = parse_plan(values)
    limits = ApprovalLimits(sites=tuple(SITES[:2]))
    home.approvals.decide(nobody.hash, "approved", "engineer", limits, nobody.code)
    with pytest.raises(Refused, match="for named sites.*plan names none"):
        home.permission(nobody).check(SITES[:2], 1)


def test_a_plan_without_names_is_approved_as_it_was_submitted(home: Home) -> None:
    """The plan names no sites, and the server adds the connected sites.

    An approval that names no sites holds for all sites.
    """
    values = home.plan.resolved()
    values["participation"] |= {"sites": [], "minimum": 2}
    nameless = parse_plan(values)
    for sites in (SITES, SITES[:2]):
        place = SiteContext(nameless.among(sites), A, sites, WANTED, home.place, "lead", home.kit, nameless)
        with pytest.raises(Refused, match=f"has not approved plan {nameless.hash[:12]};"):
            Permission(place).check()
        home.approvals.decide(nameless.hash, "approved", "engineer", code=nameless.code)
        Permission(place).check()
        home.approvals.decide(nameless.hash, "withdrawn", "engineer")
        with pytest.raises(Refused, match="has withdrawn"):
            Permission(place).check()
        home = Home(home.folder.with_name(f"kit-{len(sites)}"))


def test_rounds_are_counted_and_not_believed(home: Home) -> None:
    """The server requests round 1 again with different weights, first under the name of the study and then under the
    name of a different study.
    """
    home.approve(rounds=2)
    site, server = home.site(), Server(home.plan)
    site.answer(server.ask("join", 0))
    first = server.ask("round", 1)
    site.answer(first)
    again = site.answer(first)  # a repeated answer discloses no new number, and costs no round
    assert again.facts["task"] == "round"

    def other(study: str = "") -> StudyMessage:
        asked = server.ask("round", 1)
        asked.facts |= {"study": study} if study else {}
        asked.groups = {
            group: {name: tensor * 1.001 if tensor.is_floating_point() else tensor for name, tensor in named.items()}
            for group, named in asked.groups.items()
        }
        return asked

    site.answer(other())
    for asked in (other("another"), server.ask("round", 2)):
        with pytest.raises(Refused, match="answered all 2.*approved of plan"):
            site.answer(asked)
    [counted] = (home.approvals.folder / "answered").iterdir()
    before = counted.read_text()
    for text in ("", "{}", "[" * 9000):
        counted.write_text(text)
        with pytest.raises(Refused, match="count of answered rounds is damaged"):
            site.answer(first)
    counted.write_text(before)
    site.answer(first)


@pytest.mark.parametrize("task", ["deliver", "test"])
def test_a_limit_of_rounds_is_not_exceeded_by_the_end_of_a_study(task: str, home: Home) -> None:
    """The delivery or the test at a study's end counts as one answer, and uses up one of the allowed rounds.

    In earlier versions, a server could let a hospital score any number of different weights.
    """
    home.approve(rounds=home.plan.rounds + 1)
    site, server = home.site(), Server(home.plan)
    site.answer(server.ask("join", 0))
    for number in range(1, home.plan.rounds + 1):
        server.take(site.answer(server.ask("round", number)))
    last = server.ask("deliver", home.plan.rounds)
    site.answer(last), site.answer(last)
    asked = server.ask(task, home.plan.rounds, selected=1 if task == "test" else None)
    site.answer(asked)
    for change in range(1, 4):
        other = {
            group: {name: own + change if own.is_floating_point() else own for name, own in tensors.items()}
            for group, tensors in last.groups.items()
        }
        with pytest.raises(Refused, match=f"answered .{task}. for all studies"):
            site.answer(StudyMessage(other, asked.facts))
    site.answer(asked)


def test_as_many_rounds_as_an_approval_can_name_are_counted(home: Home) -> None:
    """In earlier versions, the counter's file exceeded its size limit after some 240,000 rounds, and was rejected as
    damaged.
    """
    with pytest.raises(MedsiloError, match=f"rounds: {MOST_ROUNDS + 1} is too large; give {MOST_ROUNDS} or less"):
        ApprovalLimits.lasting(None, MOST_ROUNDS + 1, "")
    home.approve(rounds=MOST_ROUNDS)
    decision = home.approvals.last(home.plan.hash)
    assert decision
    home.approvals.count(decision, f"{0:064}")
    [counted] = (home.approvals.folder / "answered").iterdir()
    all_but_one = [f"{number:064}" for number in range(MOST_ROUNDS - 1)]
    counted.write_text(json.dumps(json.loads(counted.read_text()) | {"rounds": all_but_one}))
    home.approvals.count(decision, "f" * 64)
    with pytest.raises(Refused, match=f"answered all {MOST_ROUNDS}"):
        home.approvals.count(decision, "e" * 64)


def test_a_round_from_another_state_or_with_fewer_cases_is_another_round(home: Home) -> None:
    """If a request repeats earlier weights with a different number of cases or a different state, the request counts as
    a new round.
    """
    home.approve(rounds=1)
    site, server = home.site(), Server(home.plan)
    first = server.ask("round", 1)
    site.answer(first)
    for told in ({"train_cases": 5}, {"last": 1}):
        other = StudyMessage(first.groups, {**first.facts, **told})
        with pytest.raises(Refused, match="answered all 1.*approved of plan"):
            site.answer(other)
    # the field "timeout" has no effect on training
    site.answer(StudyMessage(first.groups, {**first.facts, "timeout": 60.0}))


def test_an_upgrade_or_other_data_ask_again(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.approve()
    home.permission().check()
    refused(home, "approved plan .* for other data than it has now", data=DataSource(folder=tmp_path))
    own = facts_of(ENGINE)
    monkeypatch.setattr("medsilo.plan.facts_of", lambda name: {**own, "hash": "f" * 64})
    told = rf"approved plan .* with medsilo .* \({own['hash'][:12]}\), and runs .* \({'f' * 12}\) now"
    refused(home, f"{told}.*; its engineer decides there")
    home.approve()
    home.permission().check()


def test_without_a_kit_nothing_counts_as_approved(home: Home) -> None:
    with pytest.raises(Refused, match="no kit's key is here"):
        Permission(SiteContext(home.plan, A, SITES, WANTED, home.place))
    Permission(SiteContext(home.plan, A, SITES, SiteSettings(), home.place)).check()
    own = settings_of("cpu", None, home.folder / "local")  # a run on one machine needs no approval
    Permission(SiteContext(home.plan, A, SITES, own, home.place)).check()


# ---------------------------------------------------------------------------------------------------- forged approvals
def test_every_changed_byte_makes_it_void(signed: Home) -> None:
    content = signed.approvals.file.read_bytes()
    signed.permission().check()
    file = signed.approvals.file
    try:
        for place in range(len(content)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(MedsiloError, match="damaged or not signed by its key"):
                signed.approvals.decisions()
        refused(signed, "damaged or not signed by its key, so none counts")
    finally:
        file.write_bytes(content)
    signed.permission().check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nothing_that_is_cut_or_added_counts(signed: Home, data: st.DataObject) -> None:
    content = signed.approvals.file.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    other = content[:start] + data.draw(st.binary(max_size=40)) + content[end:]
    signed.approvals.file.write_bytes(other)
    try:
        if other == content:
            signed.permission().check()
        else:
            refused(signed, "damaged or not signed")
    finally:
        signed.approvals.file.write_bytes(content)


def edited(home: Home, change: Callable[[dict[str, Any]], None]) -> bytes:
    told = json.loads(home.approvals.file.read_bytes())
    change(told["content"])
    return json.dumps(told, indent=1).encode() + b"\n"


def other_signer(home: Home, folder: Path) -> Iterator[bytes]:
    for number, site in enumerate((B, A)):
        other = Home(folder / str(number), site)
        other.approve()
        yield other.approvals.file.read_bytes()
        forged = Approvals(folder / f"forged-{number}", other.approvals._key)
        forged.decide(home.plan.hash, "approved", "engineer", code=home.plan.code)
        yield forged.file.read_bytes()


def test_what_another_signed_or_somebody_edited_does_not_count(home: Home, tmp_path: Path) -> None:
    home.approve(expires=int(time.time()) - 1)
    true = home.approvals.file.read_bytes()
    longer = edited(home, lambda own: own["decisions"][0]["limits"].update(expires=int(time.time()) + 3600))
    twice = edited(home, lambda own: own["decisions"].append(own["decisions"][0] | {"beside": {}}))
    empty = edited(home, lambda own: own.update(decisions=[]))
    unsigned = json.dumps(json.loads(true) | {"signature": ""}, indent=1).encode() + b"\n"
    for content in (longer, twice, empty, unsigned, b"", b"[]", b"{" * 9000, *other_signer(home, tmp_path)):
        home.approvals.file.write_bytes(content)
        refused(home, "damaged or not signed by its key")
        with pytest.raises(MedsiloError, match="damaged"):
            home.approve()
    home.approvals.file.write_bytes(true)
    refused(home, "approved plan .* until")


def test_with_another_key_a_hospital_begins_anew(home: Home) -> None:
    home.approve()
    key, (_, signs) = fresh(), root()
    Path(home.kit.certificate).write_bytes(pem(certificate(A, key, "root", signs)))
    Path(home.kit.key).write_bytes(pem(key))
    refused(home, "has not approved")


# ---------------------------------------------------------------------------------------------------- plans that asked
def test_a_flood_of_plans_drops_no_decided_one(home: Home) -> None:
    home.permission()._keep()
    home.approve()
    for number in range(MOST_ASKED + 3):
        home.approvals.keep(AskingPlan(plan={}, hash=f"{number:064x}", at=number))
    kept = home.approvals.asked()
    assert len(kept) == MOST_ASKED + 1 and home.plan.hash in {one.hash for one in kept}


def test_a_plan_that_was_exchanged_on_the_disk_is_not_shown(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.permission()._keep()
    at_home = KitAtHome.read(home.folder)
    [asked] = home.approvals.asked()
    assert at_home.plan_of(asked) == home.plan
    other = make_plan("fedavg", *SMALL, "training.rounds=1").resolved()
    with pytest.raises(MedsiloError, match="the hashes differ"):
        at_home.plan_of(asked.model_copy(update={"plan": other}))
    [file] = (home.approvals.folder / "asked").iterdir()
    written = file.read_text("utf-8")
    for before, after in ((home.plan.hash, "0" * 64), ('"lead@clinic.example"', '"another@clinic.example"')):
        assert before in written
        file.write_text(written.replace(before, after), "utf-8")
        assert main(["approve", "--kit", str(home.folder)]) == 0
        assert "waits for a decision" not in capsys.readouterr().out


def test_the_changes_since_an_approved_plan_hide_nothing(home: Home) -> None:
    """The changes between two plans include new list items, changed list items with names, and different values that
    print alike.
    """
    many = [f"site-{number:03}" for number in range(40)]
    one = make_plan("fedavg", *SMALL, "training.rounds=4", sites=many)
    other = make_plan("fedprox", *SMALL, "training.rounds=5", sites=[*many[1:], "site-040"])
    found = {change.key: change for change in changes_since(one, other)}
    assert found.keys() >= {"participation.sites", "training.rounds", "algorithm.name", "algorithm.mu"}
    rounds = found["training.rounds"]
    assert (rounds.meaning, rounds.words) == ("rounds of the study", "5, before 4")
    assert found["participation.sites"].words == "now also site-040; no longer site-000"
    assert found["algorithm.name"].words == "fedprox, before fedavg" and found["algorithm.mu"].words == "new: 0.01"
    assert changes_since(one, one) == []
    then, now = (table_plan(high, purpose) for high, purpose in ((90, "x" * 250), (95, "x" * 251)))
    told = {change.key: change.words for change in changes_since(then, now)}
    assert told.keys() == {"task.columns", "study.purpose"}
    assert told["task.columns"] == "age: high 95.0, before 90.0"
    assert "not what was approved" in told["study.purpose"], "alike for as long as they are shown"


def table_plan(high: int, purpose: str, **changes: Any) -> Plan:
    values = make_plan("fedavg", *SMALL).resolved()
    columns = [{"name": "age", "low": 30, "high": high}, {"name": "stage", "levels": ["I", "II"]}]
    values["task"] = {"name": "table", "columns": columns, "labels": ["no", "yes"], "target": "relapse"}
    values["study"] = {"title": "Relapse", "purpose": purpose, "contact": "lead@clinic.example"}
    for key in ("network", "model_selection"):
        values.pop(key)
    return parse_plan(values).with_changes([f"{key}={value}" for key, value in changes.items()])


# ---------------------------------------------------------------------------------------------------- settings
SETTINGS = "device: cpu\napproval: required\n"


def checked(home: Home, *more: str) -> str:
    given = ["check", "--kit", str(home.folder), "--private", str(home.folder / "private.txt"), "--json", *more]
    with redirect_stdout(StringIO()) as out:
        main(given)
    findings = json.loads(out.getvalue())["findings"]
    return " | ".join(f"{one['severity']} {one['what']}" for one in findings if one["where"] == "settings")


def test_settings_that_promise_something_stay_as_their_engineer_accepted_them(home: Home) -> None:
    """A change in any settings file of the hospital invalidates the settings, even during a study."""
    file = home.folder / "local/medsilo.yaml"
    home.approve()
    assert "note local/ is signed as it is now, which nobody confirmed" in checked(home)
    assert "ok nothing in local/ changed since" in checked(home)
    permission = home.permission()
    permission.check()
    for name, text in (
        ("medsilo.yaml", "device: cpu\n"),
        ("medsilo.yaml", f"{SETTINGS}#\n"),
        ("resources.json", '{"class_allow_list": ["*"]}'),
        ("authorization.json", "{}"),
        ("resources.json.default", '{"class_allow_list": ["*"]}'),
        ("more__resources.json", '{"components": []}'),
        ("../startup/more__p_resources.json", '{"components": []}'),
        ("log_config.json", "{}"),
        ("custom/nvflare_more.py", ""),
    ):
        other = home.folder / "local" / name
        other.parent.mkdir(exist_ok=True)
        other.write_text(text)
        for own in (permission, home.permission(), home.permission(approval="none")):
            with pytest.raises(Refused, match=rf"this hospital's {name} changed since .*; its engineer .* --accept"):
                own.check()
        assert "stops" in checked(home) and f"{name} changed since" in checked(home)
        other.unlink()
        file.write_text(SETTINGS)
        permission.check()
    link = home.folder / "local/custom"
    for name in ("sitecustomize.pyc", "nvflare_more.so"):
        (link / name).touch()
        with pytest.raises(Refused, match=f"this hospital's custom/{name} changed since"):
            permission.check()
        (link / name).unlink()
    link.rmdir()
    link.symlink_to(home.folder.parent)
    with pytest.raises(Refused, match="this hospital's custom changed since"):
        permission.check()
    link.unlink()
    (link / "__pycache__").mkdir(parents=True)
    (link / "__pycache__/own.cpython-311.pyc").touch()  # Python's bytecode cache
    permission.check()
    file.unlink()
    with pytest.raises(Refused, match=r"medsilo.yaml \(missing\) changed since"):
        permission.check()
    assert "stops this hospital's medsilo.yaml is missing" in checked(home, "--accept")


def test_settings_that_promise_nothing_may_change(home: Home) -> None:
    accepted, file = AcceptedSettings(home.kit), home.folder / "local/medsilo.yaml"
    for text in ("device: cpu\n", "device: cpu\nthreads: 2\n"):
        file.write_text(text)
        assert accepted.begin(SiteSettings()) == accepted.check() == ""
    since = accepted.begin(WANTED)
    assert since.endswith("UTC") and accepted.check() == since == accepted.begin(SiteSettings())
    assert accepted.accept(SiteSettings()) == accepted.check() == ""


def test_an_engineer_says_that_a_change_is_meant(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    checked(home)
    (home.folder / "local/medsilo.yaml").write_text(f"{SETTINGS}threads: 2\n")
    refused(home, "changed since")
    capsys.readouterr()
    assert "stops" in checked(home)
    assert f"KIT is {home.folder} here" in capsys.readouterr().err
    assert "ok local/ is accepted as it is now" in checked(home, "--accept")
    refused(home, "has not approved")
    (home.folder / "local/medsilo.yaml").write_text("device: cpu\n")
    refused(home, "changed since")
    checked(home, "--accept")
    home.permission(approval="none").check()
    (home.folder / "local/medsilo.yaml").write_text("device: cpu\nthreads: 2\n")
    home.permission(approval="none").check()
    assert main(["check", "--accept"]) == 2


def test_what_is_remembered_of_settings_is_signed_by_the_kit(home: Home, tmp_path: Path) -> None:
    checked(home)
    file = home.folder / REMEMBERED
    true = file.read_text()
    other = Home(tmp_path / "other", B)
    checked(other)
    forged = json.loads(true)
    forged["content"]["files"] = {}
    for text in ("", "[]", "{" * 9000, json.dumps(forged), (other.folder / REMEMBERED).read_text(), true * 9000):
        file.write_text(text)
        refused(home, "damaged or not signed by its key, so no study runs")
    file.write_text(true)
    refused(home, "has not approved")
    (home.folder / "local/large.json").write_bytes(b" " * ((1 << 20) + 1))
    refused(home, "settings cannot be read .*, so no study runs")


# ---------------------------------------------------------------------------------------------------- commands
def test_the_commands(home: Home, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path) -> None:
    kit = ["--kit", str(home.folder)]
    refused(home, "has not approved")
    assert main(["approve", *kit]) == 0
    told = capsys.readouterr().out
    assert f"{home.plan.hash[:12]}  waits for a decision: fedavg, synthetic-activity, study study, submitted by" in told
    limits = ["--expires", "2d", "--rounds", "3", "--sites", ",".join(SITES), "--by", "Dr. A"]
    assert main(["approve", home.plan.hash[:8], *kit, *limits, "--yes", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["plan"], said["by"], said["limits"]["rounds"]) == (home.plan.hash, "Dr. A", 3)
    assert 47 * 3600 < said["limits"]["expires"] - time.time() <= 48 * 3600
    home.permission().check()
    path = home.approvals.folder / "asked" / f"{home.plan.hash}.json"
    # a hospital can withdraw an approval even if the plan's file is unreadable
    path.write_text(path.read_text().replace('"rounds":4', '"rounds":9'))
    assert main(["approve", home.plan.hash, "--decline", *kit]) == 0
    refused(home, "has withdrawn")
    job = [str(root / "jobs/fedavg")]
    write_job(tmp_path / "others", home.plan.with_changes(["participation.sites=[b, c]"]))
    assert main(["approve", "--decline", *job, *kit]) == 0
    assert main(["approve", *job, *kit, "--yes"]) == 0
    assert "passes over this hospital's training cases" in capsys.readouterr().out
    assert main(["approve", *kit, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["verdict"] for one in told["decisions"]] == ["approved", "withdrawn", "declined", "approved"]
    for wrong, words in (
        (["approve", "12345678"], "0 submitted plans have a hash that begins with 12345678"),
        (["approve", home.plan.hash, "--decline", "--rounds", "3"], "only for approved plans"),
        (["approve", "--decline"], "no plan was given"),
        (["approve", home.plan.hash, *job], "is not expected here"),
        (["approve", str(tmp_path / "others")], f"{A} is not in this plan"),
        (["approve", *job, "--sites", A], "could never run here: --sites leaves out"),
        (["approve", home.plan.hash, "--expires", "soon"], "is not a duration"),
    ):
        assert main([*wrong, *kit]) != 0
        assert words in capsys.readouterr().err


def test_a_person_reads_what_a_study_is_for_before_deciding(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`medsilo approve` shows the study's title, purpose and contact in the list of plans and before asking for a
    decision.
    """
    kit, said = ["--kit", str(home.folder)], {"title": "Lungs", "purpose": "find nodules", "contact": "lead@clinic.org"}
    home.permission()._keep()
    assert main(["approve", *kit]) == 0
    assert capsys.readouterr().out.count(": not stated") == 3
    home.plan = home.plan.with_changes([f"study.{name}={words}" for name, words in said.items()])
    home.permission()._keep()
    assert main(["approve", *kit]) == 0
    told = capsys.readouterr().out
    assert all(f"{name}: {words}" in told for name, words in said.items())

    def answer(word: str, *more: str) -> tuple[int, str]:
        terminal = StringIO(f"{word}\n")
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        return main(["approve", home.plan.hash[:12], *kit, *more]), capsys.readouterr().out

    code, told = answer("n")
    assert code == 1 and home.approvals.last(home.plan.hash) is None
    assert all(words in told for words in (*said.values(), "training on generated cases", "Approve plan"))
    code, told = answer("", "--yes")
    assert code == 0 and "Approve plan" not in told
    home.approvals.decide(home.plan.hash, "withdrawn", "engineer")
    assert answer("y")[0] == 0
    assert home.approvals.last(home.plan.hash).verdict == "approved"  # type: ignore[union-attr]


def test_nothing_is_approved_without_a_terminal_unless_that_is_said(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler runs `medsilo approve` without a terminal.

    The command's argument is the hash of a waiting plan, a job's folder, or an unknown hash.
    """
    home.permission()._keep()
    write_job(tmp_path / "job", home.plan)
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        for given in (home.plan.hash[:12], str(tmp_path / "job"), "ab" * 32):
            for more in ((), ("--json",)):
                assert main(["approve", given, "--kit", str(home.folder), *more]) == 1
                assert "--yes" in capsys.readouterr().err and not home.approvals.decisions()


def test_what_a_hospitals_data_meet_is_shown_before_a_decision(
    home: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Columns' bounds, levels, labels and units appear in the approval's question and in the disclosure report."""
    ward = {"name": "ward", "levels": ["intensive care", "palliative"]}
    age = {"name": "age", "low": 71.299, "high": 71.301}
    values = home.plan.resolved()
    values["task"] = {"name": "table", "columns": [age, ward], "labels": ["alive", "dead"], "target": "status in 90 d"}
    for key in ("network", "model_selection"):
        values.pop(key)
    write_job(tmp_path / "job", parse_plan(values))
    words = ("71.299", "71.301", "intensive care", "palliative", "alive, dead", "status in 90 d")
    for command in (["approve", "--yes", "--kit", str(home.folder)], ["disclosure"]):
        assert main([command[0], str(tmp_path / "job"), *command[1:]]) == 0
        told = capsys.readouterr().out
        assert [word for word in words if word not in told] == []


def test_a_changed_plan_of_a_job_is_approved_by_its_own_hash(
    home: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_job(tmp_path / "job", home.plan)
    kit = ["--kit", str(home.folder)]
    assert main(["approve", str(tmp_path / "job"), "--set", "training.rounds=3", *kit, "--yes", "--json"]) == 0
    approved = json.loads(capsys.readouterr().out)["plan"]
    assert approved == home.plan.with_changes(["training.rounds=3"]).hash != home.plan.hash
    assert main(["approve", approved, "--set", "training.rounds=2", *kit]) == 1
    assert "omit --set" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- a renewed kit
def renew(home: Home) -> None:
    """Give a kit a new key, as `medsilo kits make --renew --new-key` does."""
    startup, key, (_, signs) = home.folder / "startup", fresh(), root()
    startup.rename(home.folder / BEFORE)
    startup.mkdir()
    for path in (home.folder / BEFORE).iterdir():
        (startup / path.name).write_bytes(path.read_bytes())
    (startup / "client.crt").write_bytes(pem(certificate(A, key, "root", signs)))
    (startup / "client.key").write_bytes(pem(key))


def test_a_new_key_takes_over_what_the_key_before_signed(home: Home) -> None:
    """After a key renewal during a study, the hospital answers the next round without a new approval."""
    accepted = AcceptedSettings(home.kit)
    accepted.accept(WANTED)
    since, site = accepted.check(), None
    refused(home, "has not approved")
    home.approve(rounds=3)
    site = home.permission()
    site.check()
    ledger = ledger_of(QueryBudget(home.approvals.folder.parent), "0" * 16, home.kit)
    ledger.charge(CountedStudy(ONE), "round 1", "attempt0", [])
    decisions = home.approvals.decisions()
    renew(home)
    site.check()
    assert AcceptedSettings(home.kit).check() == since
    now = approvals_of(QueryBudget(home.approvals.folder.parent), home.kit, WANTED)
    assert now.file != home.approvals.file and now.decisions() == decisions
    assert [one.hash for one in now.asked()] == [home.plan.hash]
    ledger.charge(CountedStudy(ONE), "round 2", "attempt1", [])
    standing = ledger.standing()
    handing = next(entry for entry in standing.entries if entry.handed)
    assert handing.handed == standing.keys[-1] != standing.keys[1] and len(set(standing.keys[1:])) == 2
    assert [entry.attempt for entry in standing.entries if entry.kind == "charged"] == ["attempt0", "attempt1"]
    now.decide(home.plan.hash, "withdrawn", "engineer")
    with pytest.raises(Refused, match="withdrawn"):
        site.check()


def test_without_the_key_before_nothing_is_taken_over(home: Home) -> None:
    home.approve()
    renew(home)
    shutil.rmtree(home.folder / BEFORE)
    refused(home, "has not approved")


@pytest.mark.parametrize("forged", ["another root", "another hospital"])
def test_a_key_that_the_root_did_not_give_this_hospital_hands_nothing_over(home: Home, forged: str) -> None:
    """An attacker who can write into the kit, but cannot read the kit's key, adds another key and approvals signed by
    this other key.
    """
    key, (_, signs) = fresh(), root() if forged == "another hospital" else (None, fresh())
    folder = home.folder / BEFORE
    folder.mkdir()
    own = certificate(B if forged == "another hospital" else A, key, "root", signs)
    for name, content in {"client.crt": pem(own), "client.key": pem(key)}.items():
        (folder / name).write_bytes(content)
    (folder / "rootCA.pem").write_bytes((home.folder / "startup/rootCA.pem").read_bytes())
    theirs = Approvals(home.approvals.folder.parent, UseKey.of(key, "approvals"))
    theirs.decide(home.plan.hash, "approved", "nobody", None, home.plan.code)
    with pytest.raises(MedsiloError, match="startup-before"):
        home.permission().check()


def test_a_kit_that_is_being_replaced_passes(home: Home) -> None:
    home.approve()
    site = home.permission()
    (home.folder / "startup").rename(home.folder / "away")
    with pytest.raises(TemporaryRefusal):
        site.check()
    (home.folder / "away").rename(home.folder / "startup")
    site.check()


def test_a_person_stands_before_each_plan_on_patients_data_by_default(home: Home, tmp_path: Path) -> None:
    """In earlier versions, approvals were optional by default, so any lead's plan could read patients' data."""
    real = parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": "table", "columns": ["age"], "labels": ["no", "yes"]},
            "network": {"name": "linear"},
            "training": {"rounds": 1, "batch_size": 8},
            "participation": {"sites": [A]},
        }
    )
    own = DataSource(folder=tmp_path)
    for plan, own_settings, asked in (
        (real, {"data": own}, True),
        (real, {"data": own, "public_data": True}, False),
        (real, {"data": own, "approval": "none"}, False),
        (home.plan, {"data": own}, False),
        (home.plan, {"data": own, "approval": "required"}, True),
    ):
        permission = home.permission(plan, **{"approval": None, **own_settings})
        with pytest.raises(Refused, match="has not approved") if asked else nullcontext():
            permission.check()
    at_home = SiteContext(real, A, [A], SiteSettings(device="cpu", data=own), home.place)
    Permission(at_home).check()  # without a kit, the machine's owner needs no approval
