"""A hospital's approvals: nothing runs without one, whatever the server says, and nothing but its key makes one."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medsilo.check.approving import difference
from medsilo.check.at_home import KitAtHome
from medsilo.cli import main
from medsilo.cli.options import settings_of
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.package import ENGINE, facts_of
from medsilo.federation.permission import Permission
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import DisclosingSite, training_site
from medsilo.flare.jobs import write_job
from medsilo.plan import Plan, parse_plan
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
from medsilo.site.kit import KitFiles
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings
from medsilo.tasks.sources import DataSource
from tests.conftest import SITES, make_plan
from tests.unit.test_participant import SMALL, Server
from tests.unit.test_sealed_identity import certificate, fresh, pem, root

A, B = SITES[:2]
WANTED = SiteSettings(device="cpu", approval="required")


def make_kit(folder: Path, site: str) -> KitFiles:
    """A hospital's kit, as far as it is read here."""
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
    """A hospital with a kit, a plan and the place of a study."""

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
        """The hospital's site as the executor has it."""
        permission = self.permission()
        permission.check()
        permission.inner = training_site(permission.place)
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


# ---------------------------------------------------------------------------------------------------- a study
def test_a_study_runs_as_far_as_it_is_approved(home: Home) -> None:
    """Refused before data are read; approved; one round after the last; withdrawn while it trains; approved again."""
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

    site._looked = float("-inf")  # a second has passed in the middle of a round
    batches: list[int] = []

    def withdraw_in_its_middle() -> None:
        batches.append(1)
        if len(batches) == 2:
            home.approvals.decide(home.plan.hash, "withdrawn", "engineer")
            site._looked = float("-inf")

    with pytest.raises(Refused, match="has withdrawn its approval of plan"):
        site.answer(server.ask("round", 2), withdraw_in_its_middle)
    assert len(batches) == 2  # it stopped there, not at the round's end
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
    assert decision.objection("this plan", **{**asked, "code": {}}) == ""  # fewer packages change nothing that runs
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
    """A server that tells an approved list of sites for a plan that has others, or names nobody."""
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
    """The server completes it with who is there; the same approval holds for others, unless it names who may."""
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
    """A server that asks round 1 again and again with other models, in this study and under another name."""
    home.approve(rounds=2)
    site, server = home.site(), Server(home.plan)
    site.answer(server.ask("join", 0))
    first = server.ask("round", 1)
    site.answer(first)
    again = site.answer(first)  # as after a line that was cut: it tells nothing new and costs nothing
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


def test_as_many_rounds_as_an_approval_can_name_are_counted(home: Home) -> None:
    """Some 240,000 outgrew the file of the count, and then it counted as damaged."""
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
    """A server that sends the same model, and has a hospital train in many other ways from it."""
    home.approve(rounds=1)
    site, server = home.site(), Server(home.plan)
    first = server.ask("round", 1)
    site.answer(first)
    for told in ({"train_cases": 5}, {"last": 1}):
        other = StudyMessage(first.groups, {**first.facts, **told})
        with pytest.raises(Refused, match="answered all 1.*approved of plan"):
            site.answer(other)
    site.answer(StudyMessage(first.groups, {**first.facts, "timeout": 60.0}))  # on which no training rests


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
    own = settings_of("cpu", None, home.folder / "local")  # of a run on this machine, whose owner has nobody to ask
    Permission(SiteContext(home.plan, A, SITES, own, home.place)).check()


# ---------------------------------------------------------------------------------------------------- not to be forged
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
    """The same decisions, signed by somebody else: another hospital, and one whose certificate names this one."""
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
        with pytest.raises(MedsiloError, match="damaged"):  # nor does the command sign over it
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
    with pytest.raises(MedsiloError, match="its hash differs"):
        at_home.plan_of(asked.model_copy(update={"plan": other}))
    [file] = (home.approvals.folder / "asked").iterdir()
    written = file.read_text("utf-8")
    for before, after in ((home.plan.hash, "0" * 64), ('"lead@clinic.example"', '"another@clinic.example"')):
        assert before in written
        file.write_text(written.replace(before, after), "utf-8")
        assert main(["approve", "--kit", str(home.folder)]) == 0
        assert "waits for a decision" not in capsys.readouterr().out


def test_the_difference_to_an_approved_plan_hides_nothing(home: Home) -> None:
    """Values that are alike for as long as they are shown, and with other spaces."""
    many = [f"site-{number:03}" for number in range(40)]
    one = make_plan("fedavg", *SMALL, "training.rounds=4", sites=many)
    other = make_plan("fedavg", *SMALL, "training.rounds=5", sites=[*many, "site-040"])
    found = {key: (before, now) for key, before, now in difference(other, one)}
    assert found.keys() == {"participation.sites", "training.rounds"} and found["training.rounds"] == ("4", "5")
    assert difference(one, one) == []


# ---------------------------------------------------------------------------------------------------- settings
SETTINGS = "device: cpu\napproval: required\n"


def checked(home: Home, *more: str) -> str:
    """Return what 'medsilo check' says of the settings of a kit."""
    given = ["check", "--kit", str(home.folder), "--private", str(home.folder / "private.txt"), "--json", *more]
    with redirect_stdout(StringIO()) as out:
        main(given)
    findings = json.loads(out.getvalue())["findings"]
    return " | ".join(f"{one['severity']} {one['what']}" for one in findings if one["where"] == "settings")


def test_settings_that_promise_something_stay_as_their_engineer_accepted_them(home: Home) -> None:
    """Also while a study runs, and whichever of the hospital's own files was changed."""
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
        ("resources.json.default", '{"class_allow_list": ["*"]}'),  # which NVFlare reads where there is no other
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
    for name in ("sitecustomize.pyc", "nvflare_more.so"):  # Python imports these, too
        (link / name).touch()
        with pytest.raises(Refused, match=f"this hospital's custom/{name} changed since"):
            permission.check()
        (link / name).unlink()
    link.rmdir()
    link.symlink_to(home.folder.parent)  # a folder of code elsewhere, which NVFlare puts on the path of a job's process
    with pytest.raises(Refused, match="this hospital's custom changed since"):
        permission.check()
    link.unlink()
    (link / "__pycache__").mkdir(parents=True)
    (link / "__pycache__/own.cpython-311.pyc").touch()  # Python's own
    permission.check()
    file.unlink()
    with pytest.raises(Refused, match=r"medsilo.yaml \(missing\) changed since"):
        permission.check()
    assert "stops this hospital's medsilo.yaml is missing" in checked(home, "--accept")


def test_settings_that_promise_nothing_are_not_remembered(home: Home) -> None:
    accepted = AcceptedSettings(home.kit)
    for _ in range(2):
        assert accepted.begin(SiteSettings()) == accepted.check() == "" and not accepted.file.exists()
    since = accepted.begin(WANTED)
    assert since.endswith("UTC") and accepted.check() == since == accepted.begin(SiteSettings())
    assert accepted.accept(SiteSettings()) == "" and not accepted.file.exists()


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
    checked(home, "--accept")  # nothing is promised any more, so nothing is remembered
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
        refused(home, "damaged or not signed by its key, so nothing runs")
    file.write_text(true)
    refused(home, "has not approved")
    (home.folder / "local/large.json").write_bytes(b" " * ((1 << 20) + 1))
    refused(home, "settings cannot be read .*, so nothing runs")


# ---------------------------------------------------------------------------------------------------- commands
def test_the_commands(home: Home, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path) -> None:
    kit = ["--kit", str(home.folder)]
    refused(home, "has not approved")
    assert main(["approve", *kit]) == 0
    told = capsys.readouterr().out
    assert f"{home.plan.hash[:12]}  waits for a decision: fedavg, synthetic-activity, study study, submitted by" in told
    limits = ["--expires", "2d", "--rounds", "3", "--sites", ",".join(SITES), "--by", "Dr. A"]
    assert main(["approve", home.plan.hash[:8], *kit, *limits, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["plan"], said["by"], said["limits"]["rounds"]) == (home.plan.hash, "Dr. A", 3)
    assert 47 * 3600 < said["limits"]["expires"] - time.time() <= 48 * 3600
    home.permission().check()
    path = home.approvals.folder / "asked" / f"{home.plan.hash}.json"
    path.write_text(path.read_text().replace('"rounds":4', '"rounds":9'))  # withdrawing needs no plan that can be read
    assert main(["approve", home.plan.hash, "--decline", *kit]) == 0
    refused(home, "has withdrawn")
    job = [str(root / "jobs/fedavg")]
    write_job(tmp_path / "others", home.plan.with_changes(["participation.sites=[b, c]"]))
    assert main(["approve", "--decline", *job, *kit]) == 0
    assert main(["approve", *job, *kit]) == 0
    assert "passes over this hospital's training cases" in capsys.readouterr().out
    assert main(["approve", *kit, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["verdict"] for one in told["decisions"]] == ["approved", "withdrawn", "declined", "approved"]
    for wrong, words in (
        (["approve", "12345678"], "begins the hash of 0 plans that asked here"),
        (["approve", home.plan.hash, "--decline", "--rounds", "3"], "has no limits"),
        (["approve", "--decline"], "which plan?"),
        (["approve", home.plan.hash, *job], "is not expected here"),
        (["approve", str(tmp_path / "others")], f"{A} is not in this plan"),
        (["approve", *job, "--sites", A], "would never run here: --sites leaves out"),
        (["approve", home.plan.hash, "--expires", "soon"], "is not a time"),
    ):
        assert main([*wrong, *kit]) != 0
        assert words in capsys.readouterr().err


def test_a_person_reads_what_a_study_is_for_before_deciding(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Title, purpose and contact, in the list and before the question; without them, that nothing is stated."""
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


def test_a_changed_plan_of_a_job_is_approved_by_its_own_hash(
    home: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_job(tmp_path / "job", home.plan)
    kit = ["--kit", str(home.folder)]
    assert main(["approve", str(tmp_path / "job"), "--set", "training.rounds=3", *kit, "--json"]) == 0
    approved = json.loads(capsys.readouterr().out)["plan"]
    assert approved == home.plan.with_changes(["training.rounds=3"]).hash != home.plan.hash
    assert main(["approve", approved, "--set", "training.rounds=2", *kit]) == 1
    assert "leave out --set" in capsys.readouterr().err
