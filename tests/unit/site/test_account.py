"""A hospital's privacy ledger rejects a study over budget before reading data, and charges answers before sending."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.check.demands import price_list, privacy_findings
from medsilo.check.disclosure import describe
from medsilo.check.spending import spending_lines, spent
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import load_tensors
from medsilo.core.tensors import Groups
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite, training_site
from medsilo.plan import Plan, parse_plan
from medsilo.privacy.accounting import epsilon_of
from medsilo.runs.messages import Request, StudyMessage
from medsilo.runs.paths import SPENT, site_folder
from medsilo.runs.schema import Summary
from medsilo.site.ledger import CountedStudy, Ledger, LedgerStanding, ledger_of, ledgers
from medsilo.site.query_budget import QueryBudget, data_set
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.sources import DataSource
from medsilo_lab.report.page import write
from medsilo_server.record import Record
from results.analyses.__main__ import main as analyse
from results.analyses.finished import read_finished
from results.analyses.membership import check_release
from tests import inprocess
from tests.histories import dying, ended
from tests.hospital import NAMES, write_photos
from tests.unit.federation.test_protection import STUDY

pytestmark = pytest.mark.usefixtures("known_key")
PRIVATE = {
    **STUDY,
    "network": {"name": "small-cnn", "width": 2, "norm": "group"},
    "training": {"rounds": 2, "batch_size": 8},
    "privacy": {"epsilon": 2.0, "delta": 1e-3},
}
REASON = {"counts": "in our annual report"}
DEMANDS: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-3, "public": REASON}


def settings_of(data: Path, **demands: Any) -> SiteSettings:
    (cache := data.with_name(f"{data.name}-ready")).mkdir(exist_ok=True)
    own_data = {"folder": str(data), "cache_folder": str(cache)}
    return make_settings({"device": "cpu", "data": own_data, "privacy": {**DEMANDS, **demands}}, "x")


def run(root: Path, data: Path, *changes: str, plan: dict = PRIVATE, **demands: Any) -> Summary:
    return inprocess.run(parse_plan(plan, changes), folder=root, settings=settings_of(data, **demands)).summary


def standing(root: Path) -> LedgerStanding:
    book = root / "_hospital/a"
    [data] = ledgers(book)
    return Ledger(book, data).standing()


# -------------------------------------------------------------------------------------------------------- whole studies
@pytest.mark.slow
def test_a_study_is_charged_answer_by_answer_and_keeps_its_promise(photos: Path, tmp_path: Path) -> None:
    summary = run(tmp_path / "study", photos)
    found = standing(tmp_path)
    assert summary.finished
    assert [entry.what for entry in found.entries if entry.kind == "charged"] == [
        "join",
        "round 1",
        "round 2",
        "deliver",
        "test",
    ]
    spent = found.epsilon(1e-3)
    assert 1.9 < spent <= 2.0
    [study] = found.studies()
    assert study == "study" and epsilon_of(found.of(study), 1e-3) == spent
    said = json.loads((site_folder(tmp_path / "study", "a") / SPENT).read_text())
    assert said["study"] == said["all_studies"] == spent and said["allowed"] == 5.0
    assert {charge.of.kind for entry in found.entries for charge in entry.charges} == {"sampled-gaussian", "public"}


@pytest.mark.slow
def test_what_is_not_declared_public_is_not_told(photos: Path, tmp_path: Path) -> None:
    run(tmp_path / "silent", photos)
    silent = Record(tmp_path / "silent").rounds()[0].sites["a"]
    assert silent.train_loss is None and silent.validation is None and silent.validation_loss is None
    run(tmp_path / "open", photos, public={**REASON, "validation": "agreed by the board"}, epsilon=9.0)
    told = Record(tmp_path / "open").rounds()[0].sites["a"]
    assert told.validation is not None and told.train_loss is None


def test_over_the_budget_is_refused_before_data_are_read(photos: Path, tmp_path: Path) -> None:
    place = write_photos(tmp_path / "photos", NAMES)
    run(tmp_path / "one", place, epsilon=2.5)
    # the folder is moved away, because code that read the data would then raise a different error
    place.rename(tmp_path / "away")
    with pytest.raises(Refused, match=r"costs ε = .* earlier studies .* allows 2.5"):
        run(tmp_path / "two", place, "seed=1", epsilon=2.5)
    (tmp_path / "away").rename(place)
    run(tmp_path / "three", place, "privacy.epsilon=0.5", epsilon=2.5)
    assert 2.0 < standing(tmp_path).epsilon(1e-3) <= 2.5


def test_a_hospital_that_demands_privacy_gets_it_or_does_not_join(photos: Path, tmp_path: Path) -> None:
    gone = tmp_path / "nowhere"
    with pytest.raises(Refused, match="demands differential privacy .* the plan has none"):
        run(tmp_path / "bare", gone, plan=STUDY)
    with pytest.raises(Refused, match=r"\(privacy\.public\.counts"):
        run(tmp_path / "counts", gone, public={})
    with pytest.raises(MedsiloError, match="privacy.public"):
        settings_of(photos, public={"weights": "why not"})


@pytest.mark.slow
def test_where_a_plan_promises_and_the_hospital_demands_nothing_it_is_still_counted(
    photos: Path, tmp_path: Path
) -> None:
    own = make_settings({"device": "cpu", "data": str(photos)}, "x")
    with pytest.raises(Refused, match="numbers of cases.*declare them public"):
        inprocess.run(parse_plan(PRIVATE), folder=tmp_path / "bare", settings=own)
    inprocess.run(parse_plan(PRIVATE, ["privacy.counts.epsilon=0.2"]), folder=tmp_path / "study", settings=own)
    assert 1.9 < standing(tmp_path).epsilon(1e-3) <= 2.0
    told = Record(tmp_path / "study").rounds()[0].sites["a"]
    assert told.train_loss is None and told.validation is None


def test_a_tampered_ledger_lets_nothing_leave(photos: Path, tmp_path: Path) -> None:
    run(tmp_path / "one", photos, "privacy.epsilon=0.5")
    [file] = (tmp_path / "_hospital/a/ledger").glob("*.jsonl")
    file.write_bytes(b"\n".join(file.read_bytes().splitlines()[:-2]) + b"\n")
    with pytest.raises(MedsiloError, match="privacy ledger was changed or is damaged"):
        run(tmp_path / "two", photos, "privacy.epsilon=0.5")


# ----------------------------------------------------------------------------------------------------- answer by answer
def site(root: Path, data: Path, plan: dict = PRIVATE, **demands: Any) -> TrainingSite:
    folder = site_folder(root / "study", "a")
    return training_site(SiteContext(parse_plan(plan), "a", ["a"], settings_of(data, **demands), folder))


def weights(site: TrainingSite) -> Groups:
    return {
        "model": {
            name: t.clone() for name, t in site.participant.context.plan.build_networks()["model"].state_dict().items()
        }
    }


def ask(plan: Plan, groups: Groups, number: int, **facts: Any) -> StudyMessage:
    request = Request(task="round", round=number, study="study", plan=plan.hash, sites=("a",), **facts)
    return request.message(groups)


def same(one: StudyMessage, other: StudyMessage) -> bool:
    return all(tensor.equal(other.groups["model"][name]) for name, tensor in one.groups["model"].items())


@pytest.mark.slow
def test_the_same_request_gets_the_same_answer_from_the_disk_and_costs_nothing(photos: Path, tmp_path: Path) -> None:
    first = site(tmp_path, photos)
    request = ask(first.participant.context.plan, weights(first), 1)
    answer = first.answer(request)
    spent = standing(tmp_path).epsilon(1e-3)
    again = site(tmp_path, photos).answer(request)
    assert same(answer, again) and standing(tmp_path).epsilon(1e-3) == spent
    # the fact "ledger" may differ, because the ledger's head has changed
    assert {**answer.facts, "ledger": 0} == {**again.facts, "ledger": 0}
    moved = {name: tensor + 0.01 for name, tensor in request.groups["model"].items()}
    other = ask(first.participant.context.plan, {"model": moved}, 1)
    assert not same(site(tmp_path, photos).answer(other), answer)
    assert standing(tmp_path).epsilon(1e-3) > spent


@pytest.mark.slow
def test_noise_is_new_in_every_attempt(photos: Path, tmp_path: Path) -> None:
    answers = []
    for number in range(2):
        one = site(tmp_path / str(number), photos)
        answers.append(one.answer(ask(one.participant.context.plan, weights(one), 1)))
    assert not same(*answers)


@pytest.mark.slow
def test_a_state_that_was_not_charged_is_not_used(photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    first = site(tmp_path, photos)
    request = ask(first.participant.context.plan, weights(first), 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ledger, "charge", interrupt)
        first.answer(request)
    assert first.participant.state.done == -1 and list(first.folder.glob("state-1.safetensors"))
    assert site(tmp_path, photos).participant.state.restore_after(1, 1)
    assert standing(tmp_path).epsilon(1e-3) == 0
    first.answer(request)
    later = site(tmp_path, photos)
    assert later.participant.state.restore_after(1, 1) is None and later.participant.state.done == 1


def interrupt(*given: Any, **named: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_study_that_dies_at_the_ledger_goes_on_and_is_charged_for_what_left(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """One process runs server and site, and dies before or after the charge of round 2. The study is then resumed."""
    plan, own, charge = parse_plan(PRIVATE), settings_of(photos), Ledger.charge

    def die(self: Ledger, study: CountedStudy, what: str, *given: Any) -> None:
        if what == "round 2" and before:
            os._exit(9)
        charge(self, study, what, *given)
        if what == "round 2":
            os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", die)
        child = dying(lambda: inprocess.run(plan, folder=tmp_path / "study", settings=own) and None, None)
        assert ended(child) == 9
    assert sum(entry.what == "round 2" for entry in standing(tmp_path).entries) == (0 if before else 1)
    assert inprocess.run(plan, folder=tmp_path / "study", settings=own, resume=True).summary.finished
    found = standing(tmp_path)
    assert [entry.what for entry in found.entries if entry.kind == "charged" and "round" in entry.what] == [
        "round 1",
        "round 2",
    ]
    assert 1.9 < found.epsilon(1e-3) <= 2.0


@pytest.mark.slow
def test_a_server_that_asks_again_and_again_ends_at_the_budget(photos: Path, tmp_path: Path) -> None:
    one = site(tmp_path, photos, epsilon=2.2)
    model = weights(one)
    with pytest.raises(Refused, match=r"privacy\.epsilon"):
        for number in range(50):
            shifted = {name: tensor + number * 1e-3 for name, tensor in model["model"].items()}
            one.answer(ask(one.participant.context.plan, {"model": shifted}, 1))
    assert number >= 2 and standing(tmp_path).epsilon(1e-3) <= 2.2


# ------------------------------------------------------------------------------------------------------------- messages
@pytest.mark.slow
def test_the_ledger_shows_and_verifies(photos: Path, tmp_path: Path) -> None:
    run(tmp_path / "study", photos, "privacy.epsilon=0.5")
    book = QueryBudget(tmp_path / "_hospital/a")
    [data] = ledgers(book.folder, None)
    ledger = ledger_of(book, data, None)
    shown = "\n".join(spending_lines(spent(ledger, None)))
    assert "study: FedAvg" in shown and "answers: 5" in shown and "at δ = 0.001" in shown
    assert "7 lines, the last one" in shown
    [file] = (book.folder / "ledger").glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-200] + b"\n")
    with pytest.raises(MedsiloError, match="was changed or is damaged"):
        spent(ledger, None)
    page = write([tmp_path / "study"], tmp_path / "page.html", "x").read_text()
    assert "Privacy costs" in page and "ε of this study" in page


def test_check_and_disclosure_name_the_price(photos: Path, tmp_path: Path) -> None:
    plan, own = parse_plan(PRIVATE), settings_of(photos, public={**REASON, "test": "published"})
    prices = dict(price_list(plan, own))
    assert "at most ε = 2 at δ = 0.001 for each patient" in prices["tensors: model"]
    assert prices["numbers of cases"] == "0: declared public (in our annual report)"
    assert prices["score and loss over validation cases"] == "0: does not leave"
    assert "What each costs" in "\n".join(describe(plan, own))
    book = QueryBudget(tmp_path / "_hospital/a")
    [before] = privacy_findings(plan, own, book)
    assert before.severity == "ok" and "cost ε = 0.000 of 5 allowed" in before.what
    run(tmp_path / "study", photos)
    [after] = privacy_findings(plan, own, book)
    # although the noise for the 36 training cases is rounded up, the cost equals the plan's ε to three decimals
    assert after.severity == "ok" and "cost ε = 2.000 of 5" in after.what
    [bare] = privacy_findings(parse_plan(STUDY), own, book)
    assert bare.severity == "stops" and dict(price_list(parse_plan(STUDY), own))["tensors: model"] == "not protected"


@pytest.mark.slow
def test_the_models_of_a_run_are_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = parse_plan({**PRIVATE, "task": {"name": "synthetic-histology", "patients": 12, "patches": 4}})
    inprocess.run(plan, folder=tmp_path / "run")
    assert analyse(["privacy", str(tmp_path / "run"), "-o", str(tmp_path / "audit"), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "model of a: nothing found" in shown
    told = json.loads((tmp_path / "audit" / "privacy.json").read_text())
    assert told["runs"][0]["plan_hash"] == plan.hash and told["audits"][0]["models"]["model of a"]["verdict"] in shown


def test_each_expert_of_a_super_model_is_tested_by_itself(tmp_path: Path) -> None:
    task = {"name": "synthetic-histology", "patients": 12, "patches": 4}
    sites = {"sites": ["a", "b"]}
    plan = parse_plan(
        {**STUDY, "task": task, "algorithm": {"name": "fedsm"}, "participation": sites}, ["training.rounds=1"]
    )
    inprocess.run(plan, folder=tmp_path / "run")
    [finished] = read_finished([tmp_path / "run"])
    found = check_release(finished, SiteSettings(device="cpu"))
    assert sorted(found) == ["expert of a", "expert of b", "model of a", "model of b"]
    copied = load_tensors(tmp_path / "run/supermodel/personal/a.safetensors")[0]
    expert = finished.experts(torch.device("cpu"))["a"].state_dict()
    assert all(tensor.equal(expert[name]) for name, tensor in copied.items())


def test_another_folder_of_data_has_another_ledger(photos: Path) -> None:
    one, other = (data_set(DataSource(folder=place), "image-folder") for place in (photos, photos / "images"))
    assert one != other


def test_a_hospital_that_only_sees_the_outcome_pays_for_its_numbers_alone(photos: Path, tmp_path: Path) -> None:
    plan = parse_plan(PRIVATE, ['participation.sites=["b"]', 'participation.evaluation_sites=["a"]'])
    folder = site_folder(tmp_path / "study", "a")
    unseen = training_site(SiteContext(plan, "a", ["a", "b"], settings_of(photos), folder))
    joined = Request(task="join", round=0, study="study", plan=plan.hash, sites=("a", "b"))
    assert unseen.answer(joined.message({})).facts["task"] == "join"
    assert standing(tmp_path).epsilon(1e-3) == 0
