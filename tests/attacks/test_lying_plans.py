"""A dishonest lead sends plans and jobs to deceive the people who approve them, to read files, or to choose the
training cases.
"""

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError, PlanError, Refused
from medsilo.core.text import plain
from medsilo.federation.private_site import PrivateNumbers
from medsilo.flare.site_settings import settings_of_site
from medsilo.flare.workspace import plan_of_job
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.privacy.guarantees import PrivacyGuarantee
from medsilo.privacy.mechanisms import Geometric
from medsilo.runs.messages import PARTS, VARYING, Request, StudyMessage
from medsilo.site.settings import SiteSettings, make_settings
from medsilo_lab.consortium.lead import State, _job_state
from medsilo_lab.jobs import write_job
from medsilo_lab.script_plan import plan_of_script
from tests.conftest import SITES, make_plan, slow_but
from tests.hospital import write_table
from tests.sites import site_of
from tests.unit.federation.test_protection import STUDY
from tests.unit.flare.test_executor import at_site
from tests.unit.site.test_approvals import Home

FORGED = "x\ndifferential privacy: ε = 1 for each patient"
A = SITES[0]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("script")
    given = {"rounds": 2, "minimum": 2, "sites": SITES}
    return plan_of_script(nn.Sequential(nn.Linear(3, 2)), folder, {"name": "fedavg"}, **given).resolved()


@pytest.fixture
def at_once() -> Iterator[None]:
    """Fail a test after a time limit, because a pipe or device could be read forever."""

    def late(*_: object) -> None:
        raise AssertionError("it is read without end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# -------------------------------------------------------------------------------------------------------------- reading
def test_no_text_of_a_plan_makes_a_line_of_its_own(scripted: dict[str, Any]) -> None:
    """`approve` shows a plan line by line, so an injected line would look like output of medsilo."""
    layers = [*scripted["network"]["layers"], {"name": FORGED}]
    tuned = {"name": "tuned", "of": {"name": "activity-cnn"}, "train": [FORGED]}
    for values in (
        {**scripted, "task": {**scripted["task"], "metric": FORGED}},
        {**scripted, "network": {**scripted["network"], "layers": layers}},
        {**make_plan().resolved(), "network": tuned},
        {**make_plan().resolved(), FORGED: 1},
        {**make_plan().resolved(), "study": {"purpose": "x\u2028y"}},
    ):
        with pytest.raises(MedsiloError) as caught:
            parse_plan(values)
        assert "\n" not in str(caught.value)


def test_letters_that_nobody_sees_move_no_word_to_the_next_line() -> None:
    hidden = "Lungs" + "\u2800\u3164\u115f\u1160\uffa0" * 16 + "approved"
    assert plain(hidden) == "Lungs approved"
    with pytest.raises(PlanError, match=r"study\.title"):
        parse_plan({**make_plan().resolved(), "study": {"title": hidden}})


def test_another_leads_job_forges_no_line_of_the_status() -> None:
    job = {
        "job_id": "1",
        "status": "RUNNING",
        "name": f"{A}: connected\n{A}: NOT CONNECTED",
        "submitter_name": "x\r\ny",
    }
    assert all(len(line.splitlines()) == 1 for line in State((_job_state(job),)).lines())


# -------------------------------------------------------------------------------------------------------- code in a job
def test_the_reports_of_a_job_with_code_do_not_speak_for_the_code(
    scripted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disclosure report and the check know only medsilo's code, so they must make no statements about a job's own
    code.
    """
    (tmp_path / "medsilo.yaml").write_text("device: cpu\n")
    told = {}
    for name, plan in (("usual", make_plan()), ("code", make_plan()), ("script", parse_plan(scripted))):
        write_job(tmp_path / name, plan)
        if name == "code":
            (tmp_path / name / "app/custom").mkdir()
            (tmp_path / name / "app/custom/own.py").write_text("print()\n")
        assert main(["disclosure", str(tmp_path / name), "--settings", str(tmp_path)]) == 0
        main(["check", str(tmp_path / name), "--settings", str(tmp_path), "--site", A, "--json", *no_file(tmp_path)])
        report, _, found = capsys.readouterr().out.partition("{")
        noted = [one["what"] for one in json.loads("{" + found)["findings"] if one["where"] == "job"]
        told[name] = report, any("code of its own" in what for what in noted)
    assert ["No image" in text for text, _ in told.values()] == [True, False, False]
    assert ["decides what leaves" in text for text, _ in told.values()] == [False, True, True]
    assert [noted for _, noted in told.values()] == [False, True, True]
    # medsilo does not round scores of scripts
    assert "multiples of" not in told["script"][0] and "fewer than" not in told["script"][0]


def no_file(folder: Path) -> list[str]:
    return ["--private", str(folder / "private.txt")]


def test_nobody_approves_a_script_by_its_plan_alone(
    scripted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Approval covers a script's code, so `approve` shows all code of a job before asking for a decision."""
    home = Home(tmp_path / "kit")
    kit = ["--kit", str(home.folder), "--yes"]
    write_job(tmp_path / "script", parse_plan(scripted))
    assert main(["approve", str(tmp_path / "script"), *kit]) == 1
    assert "training script, which this hospital has not stored" in capsys.readouterr().err
    assert not home.approvals.decisions()
    write_job(tmp_path / "code", home.plan)
    (tmp_path / "code/app/custom").mkdir()
    (tmp_path / "code/app/custom/own.py").write_text("print('own')\n")
    assert main(["approve", str(tmp_path / "code"), *kit]) == 0
    shown = capsys.readouterr().out
    assert "decides what leaves" in shown and "print('own')" in shown
    assert home.approvals.decisions()[0].job_code


# ---------------------------------------------------------------------------------------------------------- other files
def beginning_with(file: str) -> str:
    plan = make_plan().resolved()
    plan["network"] = {"name": "tuned", "of": plan["network"], "from": file}
    return json.dumps(plan)


def test_a_jobs_plan_reads_no_other_file_of_the_hospital(tmp_path: Path, at_once: None) -> None:
    """The hospital parses a plan before anybody approves the plan.

    A path in a plan's network settings could reveal whether a patient's file exists, or could name a device that sends
    data without end.
    """
    context = at_site(tmp_path / "kit", make_plan(), A)
    (tmp_path / "kit/local/medsilo.yaml").write_text("device: cpu\n")
    config = Path(context.get_prop("__workspace_object__").get_app_config_dir("job"))
    (tmp_path / "Meyer-1961.pt").write_bytes(b"scan")
    settings, told = SiteSettings(packages=("*",)), set()
    for file in (tmp_path / "Meyer-1961.pt", tmp_path / "Mayer-1961.pt", "../../Meyer-1961.pt", "~/x.pt", "/dev/zero"):
        (config / "plan.yaml").write_text(beginning_with(str(file)))
        for read in (lambda: plan_of_job(context, settings), lambda: settings_without(context, tmp_path)):
            with pytest.raises(PlanError) as caught:
                read()
            told.add(str(caught.value))
    assert len(told) == 1 and "names a file beside its plan" in told.pop()
    (config / "begun.pt").write_bytes(b"weights")
    (config / "plan.yaml").write_text(beginning_with("begun.pt"))
    assert plan_of_job(context, settings).network.start.bytes == 7  # type: ignore[attr-defined]


def settings_without(context: Any, folder: Path) -> SiteSettings:
    (folder / "kit/local/medsilo.yaml").unlink(missing_ok=True)
    startup = folder / "kit/startup"
    for name in ("client.crt", "client.key", "rootCA.pem"):
        (startup / name).touch()
    return settings_of_site(context)


@pytest.mark.parametrize("plan", ["device", "device for weights"])
def test_a_folder_from_somebody_else_is_not_read_without_end(plan: str, tmp_path: Path, at_once: None) -> None:
    if plan == "device":
        (tmp_path / "plan.yaml").symlink_to("/dev/zero")
    else:
        (tmp_path / "begun.pt").symlink_to("/dev/zero")
        (tmp_path / "plan.yaml").write_text(beginning_with("begun.pt"))
    with pytest.raises(MedsiloError, match="cannot be read: it has more|is a device or a pipe"):
        load_plan(tmp_path / "plan.yaml")


TENSOR = {"name": "weight", "shape": [2, 3], "dtype": "float32", "learns": True}
LAYERS: dict[str, list[dict[str, Any]]] = {
    "of no layer": [{"name": "a.b", "tensors": [TENSOR]}],
    "without a name": [{"name": ""}, {"name": "a."}],
    "in place of torch's": [{"name": ""}, {"name": "_parameters"}],
    "the same as nobody's": [{"name": "", "tensors": [{**TENSOR, "same_as": "x"}]}],
    "of whole numbers that learn": [{"name": "", "tensors": [{**TENSOR, "dtype": "int64"}]}],
    "beyond all memory": [{"name": "", "tensors": [{**TENSOR, "shape": [1 << 40] * 4}]}],
    "of more bytes than its file": [{"name": "", "tensors": [{**TENSOR, "shape": [1 << 40]}]}],
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_scripts_layers_are_possible_and_no_larger_than_their_file(kind: str, scripted: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"^network\.layers: "):
        parse_plan({**scripted, "network": {**scripted["network"], "layers": LAYERS[kind]}})


# ------------------------------------------------------------------------------------------------------------- patients
TASK = {"name": "table", "kind": "classification", "labels": ["0", "1"]}
TABLE = {**STUDY, "task": TASK, "network": None}
PARTS_OF = [*["train"] * 4, *["validation"] * 5, *["test"] * 5]


def test_a_server_can_not_have_one_patient_alone_trained_on(tmp_path: Path) -> None:
    """A server could request so few training cases that all of them belong to one patient."""
    owners = [*(("p0", "train"),) * 60, *((f"p{number}", part) for number, part in enumerate(PARTS_OF, 1))]
    rows = [
        {"patient": patient, "part": part, "age": 40 + number, "outcome": number % 2}
        for number, (patient, part) in enumerate(owners)
    ]
    write_table(tmp_path / "data/cases.csv", rows)
    plan = parse_plan(TABLE, ["training.truncate=true"])
    settings = make_settings({"device": "cpu", "data": {"folder": str(tmp_path / "data"), "outcome": ["outcome"]}}, "x")
    site = site_of(plan, "a", ["a"], settings, tmp_path / "sites/a")

    def answer(cases: int) -> StudyMessage:
        return site.answer(first_round(plan, site, cases))

    with pytest.raises(DataError, match="too few for it") as caught:
        answer(1)
    assert "5 cases, of fewer patients than this hospital trains with" in caught.value.private
    facts = answer(64).facts  # the training data have 64 cases, 60 of which belong to one patient
    assert (facts["samples"], facts["patients"]["train"]) == (5 * 60, 5)


def first_round(plan: Plan, site: Any, cases: int) -> StudyMessage:
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",), train_cases=cases)
    model = {name: value.clone() for name, value in site.participant.state.model.state_dict().items()}
    return asked.message({"model": model})


# ----------------------------------------------------------------------------------------------------------- who counts
KNOWN = 57  # the age of the patient whose values the attacker wants
COLUMN = ("age", "creatinine")


def registry(folder: Path, **known: Any) -> None:
    drawn = np.random.default_rng(3).normal(90, 20, 60).round(1).tolist()
    rows: list[dict[str, Any]] = [
        {"patient": f"p{age}", "age": age, "creatinine": value, "hiv": "no", "outcome": age % 2}
        for age, value in enumerate(drawn, 30)
    ]
    rows[KNOWN - 30] |= {"creatinine": 134.0, **known}
    write_table(folder / "cases.csv", rows)


def question(drawn: np.random.Generator) -> dict[str, Any]:
    """Return a random plan of an attacker who searches for a patient's values by bisection. Bounds, levels, columns,
    class names, split fractions and folds are random.
    """
    numbers = [
        {"name": name, "low": low, "high": low + float(drawn.uniform(0.01, 80))}
        for name in drawn.permutation(COLUMN)[: drawn.integers(0, 3)].tolist()
        for low in [float(drawn.uniform(20, 140))]
    ]
    levels = [{"name": "hiv", "levels": drawn.permutation(["no", "yes", "unknown"]).tolist()[:2]}]
    task = {**TASK, "columns": [*numbers, *levels], "missing": str(drawn.choice(["mean", "mark"]))}
    if drawn.integers(2):
        task |= {"standardise": "none"}
    if drawn.integers(2):
        task |= {"shares": [0.5, 0.25, 0.25], "split": int(drawn.integers(9))}
    return {**TABLE, "task": task, "seed": int(drawn.integers(99))}


def joining(plan: Plan, folder: Path, data: Path, state: Path | None = None) -> dict[str, Any]:
    described = {"folder": str(data), "outcome": ["outcome"]}
    settings = make_settings({"device": "cpu", "data": described, "state_dir": str(state or folder / "state")}, "x")
    site = site_of(plan, "a", ["a"], settings, folder / "sites/a")
    facts = site.answer(Request(task="join", round=0, study="s", plan=plan.hash, sites=("a",)).message({})).facts
    return {name: value for name, value in facts.items() if name not in VARYING | {"warnings"}}


@pytest.mark.parametrize("questions", slow_but([40], [40, 1000], [1000]))
def test_no_question_chooses_patients(tmp_path: Path, questions: int) -> None:
    """In an earlier version, a lead read a patient's creatinine to two digits in 323 questions, because a plan's bounds
    chose which rows were counted.

    A hospital's answer to a plan does not depend on the known patient's values.
    """
    others: list[dict[str, Any]] = [{}, {"creatinine": 41.0}, {"creatinine": ""}, {"hiv": "yes"}, {"age": 57.4}]
    for number, known in enumerate(others):
        registry(tmp_path / f"data{number}", **known)
    drawn = np.random.default_rng(0)
    told = []
    for number in range(questions):
        plan, hospital = parse_plan(question(drawn)), number % len(others)
        # The attacker chooses the study's folder, but the split depends only on the hospital's key, which is the same
        # in every study.
        told.append(joining(plan, tmp_path / f"studies/{number}", tmp_path / f"data{hospital}"))
    assert all(facts == told[0] for facts in told), "a question has an answer of its own"
    assert told[0]["patients"] == {"train": 35, "validation": 10, "test": 10}


def test_a_patient_who_comes_changes_no_number_that_was_told(tmp_path: Path) -> None:
    plan, data, told = parse_plan({**TABLE, "task": {**TASK, "columns": ["age"]}}), tmp_path / "data", []
    for number in (45, 46, 47, 70):
        rows = [{"patient": f"p{one}", "age": 30 + one, "outcome": one % 2} for one in range(number)]
        write_table(data / "cases.csv", rows)
        told.append(joining(plan, tmp_path / f"studies/{number}", data, tmp_path / "state"))
    # the note on suppressed scores reveals that few patients moved, but not how many
    for facts in told:
        facts |= {"suppressed": [], "steps": {}}
    assert told[0] == told[1] == told[2]
    assert sum(told[3]["patients"].values()) > sum(told[0]["patients"].values())


def test_a_lead_reads_no_patient_from_why_a_study_stops(tmp_path: Path) -> None:
    little = parse_plan({**TABLE, "training": {"rounds": 1, "batch_size": 1, "learning_rate": 1e-8}})
    registry(tmp_path / "data")
    settings = make_settings({"device": "cpu", "data": {"folder": str(tmp_path / "data"), "outcome": ["outcome"]}}, "x")
    with pytest.raises(Refused, match=r"learning rate . steps is less") as caught:
        site_of(little, "a", ["a"], settings, tmp_path / "little")
    # the message must not state the product of learning rate and steps, which would reveal the number of cases
    assert "e-1" not in str(caught.value)


NAMELESS = [(part, 30 + n, n % 7) for n, part in enumerate(["validation"] * 12 + ["train"] * 16 + ["test"] * 12)]


@pytest.mark.parametrize("parts", ["the hospital's", "drawn"])
def test_no_choice_of_columns_gives_patients_without_names_others(parts: str, tmp_path: Path) -> None:
    """If a table names no patients, a row is identified by its values.

    In an earlier version, only the plan's columns identified a row, so a different order of columns moved patients
    between training and test data.
    """
    rows = [{"age": age, "dose": dose, "outcome": age % 2, "part": part} for part, age, dose in NAMELESS]
    rows = (
        rows if parts == "the hospital's" else [{key: row[key] for key in ("age", "dose", "outcome")} for row in rows]
    )
    write_table(tmp_path / "data/cases.csv", rows)
    settings = make_settings({"device": "cpu", "data": {"folder": str(tmp_path / "data"), "outcome": ["outcome"]}}, "x")

    def disclosed(study: str, *columns: dict[str, Any]) -> Any:
        plan = parse_plan({**TABLE, "task": {**TASK, "columns": columns}})
        return site_of(plan, "a", ["a"], settings, tmp_path / f"{study}/sites/a").participant.disclosure

    one = disclosed("one", {"name": "age"}, {"name": "dose"})
    other = disclosed("other", {"name": "dose"}, {"name": "age"})
    # the disclosed counts do not depend on the plan's first column
    fewer = disclosed("fewer", {"name": "dose"}, {"name": "age", "low": 30.5})
    assert one.patients == other.patients == fewer.patients
    assert not one.too_near | other.too_near | fewer.too_near


def test_a_crafted_model_stops_no_study_by_one_patient_who_is_scored(tmp_path: Path) -> None:
    """In an earlier version, a site rejected a crafted model that returned NaN for patients above an age. The rejection
    revealed whether a patient was older.
    """
    rows = [{"patient": f"p{age}", "part": part, "age": age, "outcome": age % 2} for part, age, _ in NAMELESS]
    write_table(tmp_path / "data/cases.csv", rows)
    task = {**TASK, "standardise": "none", "columns": [{"name": "age"}]}
    plan = parse_plan({**TABLE, "task": task, "network": {"name": "mlp", "hidden": [2, 2], "norm": "none"}})
    settings, told = (
        make_settings({"device": "cpu", "data": {"folder": str(tmp_path / "data"), "outcome": ["outcome"]}}, "x"),
        [],
    )
    for older in (40.5, 41.5, 68.5, 69.5):
        site = site_of(plan, "a", ["a"], settings, tmp_path / f"{older}/sites/a")
        below, bias, above, _, last, _ = site.participant.state.model.parameters()
        with torch.no_grad():  # the output is NaN (infinity minus infinity) for older patients on every processor
            below.fill_(1e36), bias.fill_(-1e36 * older), above.fill_(1e4), last.copy_(torch.tensor([[1.0, -1.0]]))
        model = {name: value.clone() for name, value in site.participant.state.model.state_dict().items()}
        for task in ("deliver", "test"):
            asked = Request(task=task, round=0, study="s", plan=plan.hash, sites=("a",))
            facts = site.answer(asked.message({"model": model} if task == "deliver" else {})).facts
            told.append({name: facts.get(name) for name in ("validation", "validation_loss", "test", "test_loss")})
    assert told[0] == told[2] and None not in {told[0]["validation"], told[0]["validation_loss"]}
    assert told[5] == told[7] and None not in {told[5]["test"], told[5]["test_loss"]}


def test_noise_beside_rounding_does_not_tell_whether_a_rounded_score_is_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If uniform noise spreads a score over three rounding steps, the three rounded scores are equally frequent."""
    offer = {"epsilon": 20.0, "delta": 1e-3, "scores": {"epsilon": 8.0}}
    plan = parse_plan({**TABLE, "privacy": offer}, ["task.standardise=none"])
    units = {part: [f"p{number}" for number in range(10)] for part in PARTS}
    promise = PrivacyGuarantee(epsilon=20.0, delta=1e-3)
    own, drawn = PrivateNumbers(plan, "a", None, promise, True, tmp_path, units, 5), iter(range(-1500, 1500))
    monkeypatch.setattr("medsilo.privacy.noise.NoiseSource.geometric", lambda self, scale: next(drawn))
    own.__dict__["scoring"] = Geometric(scale=1.0)
    told = [own.score("validation", 1, torch.full((10,), 0.5), 0.0, 1.0, 0.05) for _ in range(3000)]
    assert Counter(told) == {0.45: 1000, 0.5: 1000, 0.55: 1000}
