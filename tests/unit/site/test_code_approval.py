"""A hospital that requires approvals runs only code and packages that it has approved."""

import json
import os
import pty
import select
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.workspace import Workspace
from nvflare.app_common.logging.site_log_streamer import SiteLogStreamer
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.event import fire_event
from nvflare.private.fed.app.default_app_validator import DefaultAppValidator
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.fed.utils.fed_utils import get_job_launcher
from torch import nn

from medsilo.cli import main
from medsilo.core.errors import MedsiloError, Refused
from medsilo.flare.code_gate import why_not_deployed
from medsilo.flare.kit_events import HospitalEvents
from medsilo.plan import Plan, load_plan
from medsilo.runs.event_reading import read
from medsilo.site.accepted_settings import REMEMBERED
from medsilo.site.approvals import Approvals, approvals_of
from medsilo.site.job_code import ADDED, LARGEST, MOST_FILES, JobCode
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings
from medsilo_lab import recipes
from medsilo_page.pages import serve
from medsilo_script import client
from nvflare_reliability.kit_patches import AskingDeployer
from tests.unit.medsilo_page.test_site_page import Visitor, serving
from tests.unit.medsilo_script.test_script import Flare
from tests.unit.site.test_approvals import WANTED, Launcher, make_kit

SITE, LEAD = "a", "lead@clinic.example"
SCRIPT = """import torch
import medsilo.client as flare
from torch import nn

model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows, classes = torch.ones(6, 2), torch.tensor([0, 1] * 3)
flare.init()
flare.join(model, optimizer, [(rows, classes)])
while flare.is_running():
    flare.receive()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), classes).backward()
    optimizer.step()
    flare.send({"accuracy": 0.5})
"""


NVFLARES = AppDeployer()
# STREAMS_ALL would send the whole log, which contains the script's output, to the server
STREAMS_ALL = json.dumps(ADDED | {"args": {"target_parent_server": True}})


class Hospital:
    def __init__(self, folder: Path, **recipe: Any) -> None:
        self.folder, self.job = folder / "kit", folder / "jobs/hello"
        self.kit = make_kit(self.folder, SITE)
        (folder / "client.py").write_text(SCRIPT)
        given = {"name": "hello", "min_clients": 1, "num_rounds": 2, "train_script": str(folder / "client.py")}
        torch.manual_seed(0)
        recipes.FedAvgRecipe(model=nn.Linear(2, 2), **given, **recipe).export(str(folder / "jobs"))
        self.app = self.job / "app"
        if not self.app.exists():
            self.app = self.job / f"app_{SITE}"
        self.script = self.app / "custom/client.py"
        self.unpacked = self.folder / "job-1" / f"app_{SITE}"

    @property
    def plan(self) -> Plan:
        return load_plan(self.app / "config/plan.yaml")

    @property
    def approvals(self) -> Approvals:
        return approvals_of(QueryBudget(self.folder / "medsilo/_hospital" / SITE), self.kit, WANTED)

    def context(self) -> FLContext:
        streams = SiteLogStreamer(log_file_name="error_log.txt")
        parts: list[FLComponent] = [streams, HospitalEvents(), Launcher()]
        fires = lambda event, fl_ctx: fire_event(event, parts, fl_ctx)  # noqa: E731
        engine = SimpleNamespace(fire_event=fires, get_workspace=lambda: Workspace(str(self.folder), SITE))
        engine.new_context = FLContextManager(
            engine=engine,
            identity_name=SITE,
            public_stickers={},
            private_stickers={FLContextKey.WORKSPACE_ROOT: str(self.folder)},
        ).new_context
        return engine.new_context()

    def deploy(self, deployer: AppDeployer = NVFLARES) -> dict[str, Any]:
        meta = json.loads((self.job / "meta.json").read_text())
        meta |= {"job_id": "job-1", "submitter_name": LEAD}
        flat = self.folder.parent / "flat"
        shutil.rmtree(flat, ignore_errors=True)
        shutil.copytree(self.app, flat, symlinks=True)
        data = zip_directory_to_bytes(str(flat), "")
        self.told = deployer.deploy(Workspace(str(self.folder), SITE), "job-1", meta, "app", data, self.context())
        if self.told:
            return {}
        return json.loads((self.folder / "job-1/meta.json").read_text())

    def launch(self, meta: dict[str, Any] | None = None) -> str:
        meta = meta or self.deploy()
        assert meta[AppValidationKey.BYOC]
        context = self.context()
        try:
            launched = get_job_launcher(meta, context).launch_job(meta, context)
        except MedsiloError as error:
            assert "\n" not in str(error)
            return str(error)
        assert launched == "started"
        return ""

    def approve(self, *more: str, what: str = "", code: int = 0) -> None:
        assert main(["approve", what or str(self.job), "--kit", str(self.folder), *more]) == code


@pytest.fixture
def hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hospital:
    monkeypatch.setattr(AppAuthzService, "app_validator", DefaultAppValidator("client"))
    return Hospital(tmp_path)


# ------------------------------------------------------------------------------------------------------- code that runs
def test_a_script_runs_with_the_code_that_was_approved_and_no_other(
    hospital: Hospital, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job waits until a person approves the plan by the first digits of the plan's hash.

    A change of any byte of the code needs a new approval.
    """
    short = hospital.plan.hash[:12]
    told = hospital.launch()
    assert f"has not approved plan {short}" in told and f"medsilo approve {short} --kit KIT" in told
    assert any("refused" in line and told in line for line in read(hospital.folder))
    assert main(["approve", "--kit", str(hospital.folder)]) == 0
    assert "waits for a decision" in capsys.readouterr().out
    hospital.approve("--yes", what=short)
    shown = capsys.readouterr().out
    assert all(f"| {line}" in shown for line in SCRIPT.splitlines() if line)
    assert hospital.launch() == ""

    def changed(change: Callable[[], object]) -> str:
        before = {path: path.read_bytes() for path in hospital.app.rglob("*") if path.is_file()}
        change()
        told = hospital.launch()
        for path in hospital.app.rglob("*"):
            if path.is_file() and path not in before:
                path.unlink()
        for path, content in before.items():
            path.write_bytes(content)
        assert hospital.launch() == ""
        return told

    script, config = hospital.script, hospital.app / "config/config_fed_client.json"
    text = config.read_text()
    for change in (
        lambda: script.write_text(SCRIPT.replace("lr=0.1", "lr=0.2")),
        lambda: (script.parent / "sitecustomize.py").write_text(""),
        lambda: (script.parent / "data.bin").write_bytes(b"\0"),
        lambda: script.rename(script.with_name("other.py")),
        lambda: config.write_text(text.replace("client.py", "other.py")),
        lambda: config.write_text(text.replace('"components": [', f'"components": [{STREAMS_ALL},', 1)),
        lambda: (config.parent / "initial.safetensors").write_bytes(b"other"),
    ):
        assert "with other code" in changed(change)


def test_what_is_approved_again_is_shown_as_a_difference(
    hospital: Hospital, capsys: pytest.CaptureFixture[str]
) -> None:
    hospital.approve("--yes")
    hospital.script.write_text(SCRIPT.replace("lr=0.1", "lr=0.2"))
    (hospital.script.parent / "more.py").write_text("import socket\n")
    assert "with other code" in hospital.launch()
    assert main(["approve", "--kit", str(hospital.folder)]) == 0
    assert "waits for a decision" in capsys.readouterr().out
    hospital.approve("--yes", "--by", "A. Person", what=hospital.plan.hash[:12])
    shown = capsys.readouterr().out
    assert "| -optimizer = torch.optim.SGD(model.parameters(), lr=0.1)" in shown
    assert "| +optimizer = torch.optim.SGD(model.parameters(), lr=0.2)" in shown
    assert "| import socket" in shown and "of Python's own: socket" in shown
    assert "config/config_fed_client.json: same" in shown and "custom/client.py: changed" in shown
    assert hospital.launch() == ""
    [first, second] = hospital.approvals.decisions()
    assert first.job_code and second.job_code and first.job_code.hash != second.job_code.hash
    assert second.job_code.versions["torch"] == torch.__version__
    hospital.approve("--decline")
    assert "has withdrawn" in hospital.launch()


def test_another_version_of_a_package_that_the_code_imports_asks_again(
    hospital: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(version: str) -> None:
        shutil.rmtree(tmp_path / "packages", ignore_errors=True)
        facts = tmp_path / f"packages/acme_gait-{version}.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-gait\nVersion: {version}\n")
        (facts / "top_level.txt").write_text("gait\n")

    monkeypatch.syspath_prepend(tmp_path / "packages")
    hospital.script.write_text(f"import json, gait.steps as steps\n{SCRIPT}")
    hospital.approve("--yes")
    install("1.0")
    assert "acme-gait no such package, and here is 1.0" in hospital.launch()
    hospital.approve("--yes")
    assert hospital.launch() == ""
    install("2.0")
    told = hospital.launch()
    assert "acme-gait 1.0" in told and "2.0" in told


def test_the_lead_reads_the_reason_from_what_is_deployed(hospital: Hospital) -> None:
    """A job that failed at its start would end for all hospitals, and would give the lead no reason."""
    asking = AskingDeployer(why_not_deployed)
    assert hospital.deploy(asking) == {} and not hospital.unpacked.parent.exists()
    assert "has not approved plan" in hospital.told and any(hospital.told in line for line in read(hospital.folder))
    hospital.approve("--yes", what=hospital.plan.hash[:12])
    assert hospital.launch(hospital.deploy(asking)) == ""
    shutil.rmtree(hospital.app / "custom")  # a job without code has no folder custom/
    assert "byoc" not in hospital.deploy(asking) and hospital.told == ""


def test_a_plan_that_was_approved_without_code_lets_no_code_run(hospital: Hospital) -> None:
    """An approval of the plan's hash that was given before the job arrived does not cover the job's code."""
    hospital.approve("--yes", what=hospital.plan.hash)
    assert "without code, and this job brings code" in hospital.launch()
    (hospital.app / "config/plan.yaml").unlink()
    assert "no plan" in hospital.launch()


def test_an_image_of_the_leads_is_no_approved_code(hospital: Hospital) -> None:
    hospital.approve("--yes")
    meta = hospital.deploy()
    assert hospital.launch(meta) == ""
    meta["launcher_spec"] = {SITE: {"docker": {"image": "lead/own"}}}
    assert "image or path of its own" in hospital.launch(meta)


def test_a_hospital_without_the_demand_starts_any_code(hospital: Hospital) -> None:
    (hospital.folder / "local/medsilo.yaml").write_text("device: cpu\n")
    (hospital.script.parent / "link").symlink_to("client.py")
    assert hospital.launch() == ""


def test_settings_that_changed_since_they_were_accepted_start_no_code(hospital: Hospital) -> None:
    """If somebody changes the setting "approval" to "none", the kit still starts no code."""
    hospital.approve("--yes")
    assert hospital.launch() == ""
    (hospital.folder / "local/medsilo.yaml").write_text("device: cpu\napproval: none\n")
    assert "medsilo.yaml changed" in hospital.launch()


def test_a_hospital_that_demands_privacy_runs_no_code(hospital: Hospital) -> None:
    """The privacy ledger cannot charge the answers of code, so not even an approval lets the code run."""
    demands = "device: cpu\napproval: {}\nprivacy: {{epsilon: 1, delta: 1e-5}}\n"
    for approval in ("required", "none"):
        (hospital.folder / "local/medsilo.yaml").write_text(demands.format(approval))
        hospital.approve("--yes")
        assert "demands differential privacy" in hospital.launch()


def test_each_site_of_a_recipe_has_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's arguments differ between sites, and an approval covers only the arguments for the hospital's own
    site.
    """
    monkeypatch.setattr(AppAuthzService, "app_validator", DefaultAppValidator("client"))
    named = Hospital(tmp_path, sites=[SITE, "b"], launch_external_process=True)
    assert named.app.name == f"app_{SITE}"
    named.approve("--yes")
    assert named.launch() == ""
    config = named.app / "config/config_fed_client.json"
    config.write_text(config.read_text().replace("python3", "sh"))
    assert "with other code" in named.launch()


# ---------------------------------------------------------------------------------------- medsilo approve at a terminal
@pytest.mark.slow
def test_a_person_is_asked_at_a_terminal(hospital: Hospital) -> None:
    """`medsilo approve` runs in a terminal; the answer "no" rejects the job, and the answer "yes" starts the job."""
    command = [sys.executable, "-m", "medsilo", "approve", str(hospital.job), "--kit", str(hospital.folder)]
    for answer, started in (("n", False), ("y", True)):
        process, terminal = pty.fork()
        if process == 0:
            os.execve(command[0], command, {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"})
        said, deadline, asked = b"", time.monotonic() + 120, False
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                said += os.read(terminal, 65536)
            except OSError:
                break
            if b"Approve plan" in said and not asked:
                asked = True
                os.write(terminal, f"{answer}\n".encode())
        os.waitpid(process, 0)
        os.close(terminal)
        assert asked and b"with code" in said and b"flare.join(model" in said
        assert (hospital.launch() == "") is started


def test_without_a_terminal_nothing_is_approved(hospital: Hospital, capsys: pytest.CaptureFixture[str]) -> None:
    hospital.approve(code=1)
    assert "the plan is not approved" in capsys.readouterr().err
    assert not hospital.approvals.decisions()


def test_the_page_shows_the_code_and_signs_what_it_showed(hospital: Hospital) -> None:
    hospital.launch()
    path = f"/plan/{hospital.plan.hash}"
    with serving(serve(hospital.folder, 0)) as gate:
        visitor = Visitor(gate)
        visitor.begin()
        assert "with code" in visitor.page() and "Read its code, then decide" in visitor.page()
        shown = visitor.page(path)
        assert "flare.join(model, optimizer" in shown and "custom/client.py: new" in shown
        [asked] = hospital.approvals.asked()
        hospital.script.write_text(SCRIPT.replace("lr=0.1", "lr=0.2"))
        hospital.launch()
        status, text, _ = visitor.send(f"{path}/approve", by="x", code=asked.job_code)
        assert status == 400 and "changed after this page was shown" in text
        status, text, _ = visitor.send(f"{path}/approve", by="x")
        assert status == 400 and not hospital.approvals.decisions()
        [asked] = hospital.approvals.asked()
        assert visitor.send(f"{path}/approve", by="A. Person", code=asked.job_code)[0] == 303
        assert hospital.launch() == "" and "this plan is approved with this code" in visitor.page(path).lower()
        hospital.script.write_text(SCRIPT.replace("lr=0.1", "lr=0.3"))
        hospital.launch()
        shown = visitor.page(path)
        assert "-optimizer = torch.optim.SGD(model.parameters(), lr=0.2)" in shown
        assert "+optimizer = torch.optim.SGD(model.parameters(), lr=0.3)" in shown
        assert visitor.send(f"{path}/decline", by="A. Person")[0] == 303
        assert "has declined" in hospital.launch()


# ---------------------------------------------------------------------------------------------------------- odd folders
def link(custom: Path) -> None:
    (custom / "data").symlink_to("/etc/passwd")


def linked_folder(custom: Path) -> None:
    (custom / "lib").symlink_to("/usr/lib")


def many(custom: Path) -> None:
    for number in range(100_000):
        os.close(os.open(custom / f"{number}", os.O_CREAT))


def deep(custom: Path) -> None:
    (custom / Path(*["d"] * 200)).mkdir(parents=True)


def large(custom: Path) -> None:
    with (custom / "weights.bin").open("wb") as file:
        file.truncate(2 << 30)


def pipe(custom: Path) -> None:
    os.mkfifo(custom / "pipe")


def bytecode(custom: Path) -> None:
    (custom / "__pycache__").mkdir()
    (custom / "__pycache__/client.cpython-311.pyc").write_bytes(b"\0")


def odd_name(custom: Path) -> None:
    (custom / "client\u202e.py").write_text("")


@pytest.mark.parametrize(
    "odd",
    [link, linked_folder, pytest.param(many, marks=pytest.mark.slow), deep, large, pipe, bytecode, odd_name],
)
def test_a_folder_that_nobody_can_read_is_refused_at_once(
    odd: Callable[[Path], None], hospital: Hospital, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both `medsilo approve` and the deployment of the job reject an unusual folder of code."""
    hospital.approve("--yes")
    meta = hospital.deploy()
    for custom in (hospital.app / "custom", hospital.unpacked / "custom"):
        odd(custom)
    capsys.readouterr()
    began = time.monotonic()
    hospital.approve("--yes", code=1)
    (told,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert told.startswith("medsilo: ") and time.monotonic() - began < 60
    began = time.monotonic()
    told = hospital.launch(meta)
    assert "code" in told and time.monotonic() - began < 60
    assert len(hospital.approvals.decisions()) == 1


def test_code_is_read_up_to_its_limits(tmp_path: Path) -> None:
    (tmp_path / "custom").mkdir()
    for number in range(MOST_FILES - 1):
        (tmp_path / f"custom/{number}.py").write_text("")
    (tmp_path / "custom/0.py").write_bytes(b"x" * LARGEST)
    assert JobCode.read(tmp_path, {}).size == LARGEST
    (tmp_path / "custom/1.py").write_bytes(b"x")
    with pytest.raises(MedsiloError, match="more than 4,194,304 bytes"):
        JobCode.read(tmp_path, {})
    (tmp_path / "custom/1.py").unlink()
    for number in range(2):
        (tmp_path / f"custom/more-{number}.py").write_text("")
    with pytest.raises(MedsiloError, match="more than 1000 files"):
        JobCode.read(tmp_path, {})


def test_names_and_contents_can_not_be_exchanged() -> None:
    """Two folders have the same hash only if they have the same file names with the same contents."""
    folders = [{"a": b"b", "b": b"a"}, {"a": b"a", "b": b"b"}, {"a": b"ab"}, {"a": b"", "ab": b""}, {"ab": b""}, {}]
    folders += [{"a": b"1\0b", "c": b""}, {"a": b"1", "b": b"c"}]
    assert len({JobCode(files).hash for files in folders}) == len(folders)


def test_kept_code_that_was_changed_is_not_shown(hospital: Hospital) -> None:
    hospital.launch()
    [file] = (hospital.approvals.folder / "code").glob("*.json")
    file.write_text(file.read_text().replace('"custom/client.py"', '"custom/other.py"'))
    hospital.approve("--yes", what=hospital.plan.hash[:12], code=1)
    assert not hospital.approvals.decisions()


# ------------------------------------------------------------------------------------------------------- in its process
@pytest.fixture
def script(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    monkeypatch.setattr(client, "before_script_connects", lambda begin: None)

    def run() -> list[Any]:
        for name, value in {"_site": None, "_follows": None, "_rank": "0"}.items():
            monkeypatch.setattr(client, name, value)
        plan = hospital.plan
        server = Flare(plan.among((SITE,)), {"model": nn.Linear(2, 2).state_dict()})
        monkeypatch.setattr(client, "flare", server)
        monkeypatch.syspath_prepend(hospital.unpacked / "custom")
        exec(compile((hospital.unpacked / "custom/client.py").read_text(), "client.py", "exec"), {})
        return server.sent

    return run


def test_a_script_answers_as_long_as_its_approval_holds(hospital: Hospital, script: Callable[[], list[Any]]) -> None:
    """The kit rejects a script whose code has changed, and rejects answers beyond the approved number of rounds."""
    hospital.approve("--yes")
    assert hospital.launch() == ""
    assert len(script()) == 4
    hospital.approve("--yes", "--rounds", "1")
    shutil.rmtree(hospital.folder / "medsilo/study", ignore_errors=True)
    with pytest.raises(Refused, match="approved at most 1 round"):
        script()
    hospital.approve("--yes")
    unpacked = hospital.unpacked / "custom/client.py"
    unpacked.write_text(unpacked.read_text() + "\n")
    with pytest.raises(Refused, match="with other code"):
        script()


def test_a_script_runs_at_a_new_kit_that_approves_nothing(hospital: Hospital, script: Callable[[], list[Any]]) -> None:
    """In earlier versions, a new kit rejected its script after the first answer, because the file
    accepted-settings.json was missing.
    """
    (hospital.folder / "local/medsilo.yaml").write_text("device: cpu\napproval: none\n")
    assert hospital.launch() == ""
    assert len(script()) == 4
    (hospital.folder / REMEMBERED).unlink()
    assert "accepted-settings.json is missing" in hospital.launch()


def test_what_a_script_sends_is_counted_as_other_answers_are(
    hospital: Hospital, script: Callable[[], list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The query budget counts the script's answers, up to the hospital's limit."""
    hospital.approve("--yes")
    hospital.launch()
    sent = script()
    capsys.readouterr()
    assert main(["ledger", "show", "--kit", str(hospital.folder), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["answers"]
    assert (found["lead"], found["study"]) == (LEAD, "study")
    tensors = sum(8 * own.nbytes for one in sent for own in one.params.values())
    assert found["script"]["messages"] == len(sent) == 4 and found["script"]["tensors"] == tensors == 2 * 6 * 32
    # 64 bits for each of two scores, and one bit for each metric that may be absent: three per round and two in the
    # delivery
    assert found["answers"]["validation"] == 2 and found["script"]["metrics"] == 2 * 64 + 2 * 3 + 2
    assert main(["ledger", "show", "--kit", str(hospital.folder)]) == 0
    assert "its script sent 4 messages; bits: " in capsys.readouterr().out
    shutil.rmtree(hospital.folder / "medsilo/study")
    (hospital.folder / "local/medsilo.yaml").write_text("device: cpu\napproval: required\nanswers: 1\n")
    main(["check", "--kit", str(hospital.folder), "--accept", "--private", str(hospital.folder / "private.txt")])
    with pytest.raises(Refused, match="needs . answers with scores"):
        script()


def test_settings_say_who_approves_scripts() -> None:
    assert SiteSettings(device="cpu", data={"folder": "x"}).approval_of() == "required"
