"""Plans and jobs of a lead who lies: what a person reads before deciding, what is read before anybody decided, and
what is trained on."""

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError, PlanError, Refused
from medsilo.core.text import plain
from medsilo.federation.private_site import PrivateNumbers
from medsilo.flare.jobs import write_job
from medsilo.flare.site_settings import settings_of_site
from medsilo.flare.workspace import plan_of_job
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.privacy.guarantees import PrivacyGuarantee
from medsilo.privacy.mechanisms import Geometric
from medsilo.runs.messages import PARTS, Request, StudyMessage
from medsilo.script.study import plan_of_script
from medsilo.site.settings import SiteSettings, make_settings
from medsilo_lab.consortium.lead import State, _job_state
from tests.conftest import SITES, make_plan
from tests.hospital import write_table
from tests.sites import site_of
from tests.unit.test_approvals import Home
from tests.unit.test_executor import at_site
from tests.unit.test_protection import STUDY

FORGED = "x\ndifferential privacy: ε = 1 for each patient"
A = SITES[0]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plan of a user's own training script."""
    folder = tmp_path_factory.mktemp("script")
    given = {"rounds": 2, "minimum": 2, "sites": SITES}
    return plan_of_script(nn.Sequential(nn.Linear(3, 2)), folder, {"name": "fedavg"}, **given).resolved()


@pytest.fixture
def at_once() -> Iterator[None]:
    """End a test that reads without end."""

    def late(*_: object) -> None:
        raise AssertionError("it is read without end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------------------------------------------- what is read
def test_no_text_of_a_plan_makes_a_line_of_its_own(scripted: dict[str, Any]) -> None:
    """`approve` shows a plan line by line: one more would be taken for medsilo's."""
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
    """A terminal breaks a line after its last column: blank letters would push a word there."""
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


# ---------------------------------------------------------------------------------------------------- code in a job
def test_the_reports_of_a_job_with_code_do_not_speak_for_the_code(
    scripted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of a script's job, nor of a usual one that brings code beside its plan; without code they do."""
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
    assert "multiples of" not in told["script"][0] and "fewer than" not in told["script"][0]  # nothing is rounded


def no_file(folder: Path) -> list[str]:
    return ["--private", str(folder / "private.txt")]


def test_nobody_approves_a_script_by_its_plan(
    scripted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its site asks for no approval, so a decision would hold nothing. Code beside a plan is said before approving."""
    home = Home(tmp_path / "kit")
    kit = ["--kit", str(home.folder)]
    write_job(tmp_path / "script", parse_plan(scripted))
    for more in ([], ["--decline"]):
        assert main(["approve", str(tmp_path / "script"), *kit, *more]) == 1
        assert "byoc" in capsys.readouterr().err
    assert not home.approvals.decisions()
    write_job(tmp_path / "code", home.plan)
    (tmp_path / "code/app/custom").mkdir()
    (tmp_path / "code/app/custom/own.py").write_text("print()\n")
    assert main(["approve", str(tmp_path / "code"), *kit]) == 0
    assert "decides what leaves" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- other files
def beginning_with(file: str) -> str:
    """Return the text of a plan whose network begins with a file."""
    plan = make_plan().resolved()
    plan["network"] = {"name": "tuned", "of": plan["network"], "from": file}
    return json.dumps(plan)


def test_a_jobs_plan_reads_no_other_file_of_the_hospital(tmp_path: Path, at_once: None) -> None:
    """Before anybody approved it: whether a patient's file is there would show, and a device is read without end."""
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
    """Return the settings of a kit that has none, which are read after the plan."""
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
    with pytest.raises(MedsiloError, match="cannot be read: it has more|no such file"):
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
    """Sizes of messages follow from them."""
    with pytest.raises(PlanError, match=r"^network\.layers: "):
        parse_plan({**scripted, "network": {**scripted["network"], "layers": LAYERS[kind]}})


# ---------------------------------------------------------------------------------------------------- patients
TASK = {"name": "table", "kind": "classification", "labels": ["0", "1"]}
TABLE = {**STUDY, "task": TASK, "network": None}
PARTS_OF = [*["train"] * 4, *["validation"] * 5, *["test"] * 5]


def test_a_server_can_not_have_one_patient_alone_trained_on(tmp_path: Path) -> None:
    """The plan asks for sites of one size, the server says which: five cases may be of one patient."""
    owners = [*(("p0", "train"),) * 60, *((f"p{number}", part) for number, part in enumerate(PARTS_OF, 1))]
    rows = [
        {"patient": patient, "part": part, "age": 40 + number, "outcome": number % 2}
        for number, (patient, part) in enumerate(owners)
    ]
    write_table(tmp_path / "data/cases.csv", rows)
    plan = parse_plan(TABLE, ["training.truncate=true"])
    settings = make_settings({"device": "cpu", "data": str(tmp_path / "data")}, "x")
    site = site_of(plan, "a", ["a"], settings, tmp_path / "sites/a")

    def answer(cases: int) -> StudyMessage:
        return site.answer(first_round(plan, site, cases))

    with pytest.raises(DataError, match="too few for it") as caught:
        answer(1)
    assert "5 cases, of fewer patients than this hospital trains with" in caught.value.private
    assert answer(64).facts["samples"] == 5  # all, as it is told: six patients, of whom each counts for one case


def first_round(plan: Plan, site: Any, cases: int) -> StudyMessage:
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",), train_cases=cases)
    model = {name: value.clone() for name, value in site.participant.state.model.state_dict().items()}
    return asked.parcel({"model": model})


def asked(age: float, *levels: str) -> dict[str, Any]:
    """A plan that reads the lines of one age alone, and knows these levels of a diagnosis."""
    columns = [{"name": "age", "low": age - 0.5, "high": age + 0.5}, {"name": "dx", "levels": levels}]
    return {**TABLE, "task": {**TASK, "columns": columns if levels else columns[:1]}}


def test_a_lead_reads_no_patient_from_why_a_study_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One plan told whether the patient aged 57 has a diagnosis, another how many are of an age, exactly, uncounted."""
    rows = [
        {"patient": f"p{age}", "age": age, "dx": "rare" if age == 57 else "flu", "outcome": age % 2}
        for age in range(30, 90)
    ]
    write_table(tmp_path / "data/cases.csv", rows)
    settings = {"device": "cpu", "data": str(tmp_path / "data")}
    plans = [asked(57, "flu", "none"), asked(58, "flu", "none"), asked(57), asked(2000)]
    little = parse_plan({**TABLE, "training": {"rounds": 1, "batch_size": 1, "learning_rate": 1e-8}})
    told, own = set(), []
    for number, plan in enumerate(plans):
        for how in ({}, {"public_data": True}):
            with pytest.raises(MedsiloError) as caught:
                site_of(parse_plan(plan), "a", ["a"], make_settings(settings | how, "x"), tmp_path / f"{number}{how}")
            if how:
                own.append(str(caught.value))
            else:
                told.add(str(caught.value))
                assert "lines" in caught.value.private or "cases" in caught.value.private  # for its own errors.log
    assert len(told) == 1 and "medsilo check" in told.pop()
    assert "(1)" in own[0] and "(59)" in own[2]  # whose data are everybody's sees them
    with pytest.raises(Refused, match=r"learning rate . steps is less") as caught:
        site_of(little, "a", ["a"], make_settings(settings, "x"), tmp_path / "little")
    assert "e-1" not in str(caught.value)  # that product tells how many cases there are
    (tmp_path / "medsilo.yaml").write_text(f"device: cpu\ndata: {tmp_path / 'data'}\n")
    write_job(tmp_path / "job", parse_plan(plans[0]))
    assert main(["check", str(tmp_path / "job"), "--settings", str(tmp_path), "--site", "a", *no_file(tmp_path)]) == 1
    printed = capsys.readouterr().out  # which may be mailed
    assert "does not know (fewer than 5)" in printed and "(1)" not in printed


NAMELESS = [(part, 30 + n, n % 7) for n, part in enumerate(["validation"] * 12 + ["train"] * 16 + ["test"] * 12)]


@pytest.mark.parametrize("parts", ["the hospital's", "drawn"])
def test_no_choice_of_columns_gives_patients_without_names_others(parts: str, tmp_path: Path) -> None:
    """A line that names no patient is named by what stands in it. By the columns of a plan alone, another order of them
    moved patients from part to part, and hid that one of them was left out."""
    rows = [{"age": age, "dose": dose, "outcome": age % 2, "part": part} for part, age, dose in NAMELESS]
    rows = (
        rows if parts == "the hospital's" else [{key: row[key] for key in ("age", "dose", "outcome")} for row in rows]
    )
    write_table(tmp_path / "data/cases.csv", rows)
    settings = make_settings({"device": "cpu", "data": str(tmp_path / "data")}, "x")

    def disclosed(study: str, *columns: dict[str, Any]) -> Any:
        plan = parse_plan({**TABLE, "task": {**TASK, "columns": columns}})
        return site_of(plan, "a", ["a"], settings, tmp_path / f"{study}/sites/a").participant.disclosure

    one = disclosed("one", {"name": "age"}, {"name": "dose"})
    other = disclosed("other", {"name": "dose"}, {"name": "age"})
    fewer = disclosed("fewer", {"name": "dose"}, {"name": "age", "low": 30.5})  # all but the first
    assert one.patients == other.patients and not one.too_near | other.too_near
    [part] = fewer.too_near
    assert len({*one.patients[part]} - {*fewer.patients[part]}) == 1 and not fewer.tells(part)


def test_a_crafted_model_stops_no_study_by_one_patient_who_is_scored(tmp_path: Path) -> None:
    """Its output was NaN for who is older than asked, and the refusal an exact answer that nobody counted."""
    rows = [{"patient": f"p{age}", "part": part, "age": age, "outcome": age % 2} for part, age, _ in NAMELESS]
    write_table(tmp_path / "data/cases.csv", rows)
    task = {**TASK, "standardise": "none", "columns": [{"name": "age"}]}
    plan = parse_plan({**TABLE, "task": task, "network": {"name": "mlp", "hidden": [2], "norm": "none"}})
    settings, told = make_settings({"device": "cpu", "data": str(tmp_path / "data")}, "x"), []
    for older in (40.5, 41.5, 68.5, 69.5):  # one patient who is validated, none, one who is tested, none
        site = site_of(plan, "a", ["a"], settings, tmp_path / f"{older}/sites/a")
        below, bias, last, _ = site.participant.state.model.parameters()
        with torch.no_grad():  # infinity less infinity, for who is older
            below.fill_(1e36), bias.fill_(-1e36 * older), last.copy_(torch.tensor([[1e4, -1e4]]))
        model = {name: value.clone() for name, value in site.participant.state.model.state_dict().items()}
        for task in ("deliver", "test"):
            asked = Request(task=task, round=0, study="s", plan=plan.hash, sites=("a",))
            facts = site.answer(asked.parcel({"model": model} if task == "deliver" else {})).facts
            told.append({name: facts.get(name) for name in ("validation", "validation_loss", "test", "test_loss")})
    assert told[0] == told[2] and None not in {told[0]["validation"], told[0]["validation_loss"]}
    assert told[5] == told[7] and None not in {told[5]["test"], told[5]["test_loss"]}


def test_noise_beside_rounding_does_not_tell_whether_a_rounded_score_is_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is in thousandths of a step: as many of them must make each number of steps, even or odd."""
    offer = {"epsilon": 20.0, "delta": 1e-3, "scores": {"epsilon": 8.0}}
    plan = parse_plan({**TABLE, "privacy": offer}, ["task.standardise=none"])
    units = {part: [f"p{number}" for number in range(10)] for part in PARTS}
    promise = PrivacyGuarantee(epsilon=20.0, delta=1e-3)
    own, drawn = PrivateNumbers(plan, "a", None, promise, True, tmp_path, units, 5), iter(range(-1500, 1500))
    monkeypatch.setattr("medsilo.privacy.noise.NoiseSource.geometric", lambda self, scale: next(drawn))
    own.__dict__["scoring"] = Geometric(scale=1.0)  # else worked out, which takes seconds
    told = [own.score("validation", 1, torch.full((10,), 0.5), 0.0, 1.0, 0.05) for _ in range(3000)]
    assert Counter(told) == {0.45: 1000, 0.5: 1000, 0.55: 1000}
