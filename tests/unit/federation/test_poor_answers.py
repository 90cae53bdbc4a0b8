"""An error about wrong input names the fault, its place and the remedy, before the computation starts."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api.api_spec import JobNotRunning, NoConnection

from medsilo import cli
from medsilo.cli.plan_keys import SETTINGS, as_written, check_keys, keys_of_plans
from medsilo.core.errors import MedsiloError
from medsilo.core.source_keys import PLAN_CLASS, keys_in_source
from medsilo.core.wording import _sections_in
from medsilo.plan import Plan, load_plan
from medsilo.registry import LAYERS, TABLES
from medsilo.runs import paths
from medsilo.site.settings import SiteSettings
from medsilo_lab.consortium import lead
from medsilo_lab.engines.simulator import Needs, Starting
from medsilo_pretrained.embedding import FrozenNetwork
from medsilo_pretrained.tuned import Tuned
from medsilo_server.record import Record
from tests.conftest import make_plan
from tests.hospital import photograph, write_pixels
from tests.unit.cli.test_cli import one_line

NINE = "participation.sites=[a, b, c, d, e, f, g, h, i]"


@pytest.fixture
def here(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").symlink_to(root / "jobs")
    return tmp_path


# ---------------------------------------------------------------------------------------------------- the plan
@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (
            "network.name=unet",
            "network.name: unet gives a map of 48 × 48 with 2 classes, and task synthetic-histology needs 2 scores, "
            "one per class; choose another network, for example small-cnn",
        ),
        (NINE, "participation.sites: 9 sites, but task"),
        ("task.size=50", "task.size: 50 is not a multiple of 16"),
        ("lr=0.1", "(did you mean training.learning_rate?)"),
        ("Epochs=2", "(did you mean training.local_epochs?)"),
        ("Training.Rounds=2", "(did you mean training?)"),
        ("training.Rounds=2", "(did you mean rounds?)"),
        ("training.optimizer=SDG", "(did you mean sgd?)"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_nvflare_starts(
    here: Path, change: str, answer: str, capsys: pytest.CaptureFixture
) -> None:
    assert answer in one_line(capsys, 1, "run", "jobs/fedavg", "--set", change)
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_a_classifier_does_not_segment() -> None:
    with pytest.raises(MedsiloError, match=r"small-cnn gives 2 scores.*needs a map"):
        make_plan("fedavg", "task.name=synthetic-prostate", "network.name=small-cnn")
    folder = {"labels=[tumour]": "unet", "kind=classification": "densenet121"}
    for change, network in folder.items():
        other = {"unet": "densenet121", "densenet121": "unet"}[network]
        changes = ["task.name=image-folder", f"task.{change}", "task.size=[64, 64]"]
        changes += ["task.labels=[a, b]"] if network == "densenet121" else []
        assert make_plan("fedavg", *changes).network.name == network
        with pytest.raises(MedsiloError, match=f"{other} gives .* for example {network}"):
            make_plan("fedavg", *changes, f"network.name={other}")


def test_a_key_of_a_network_changes_the_tasks_own() -> None:
    own = make_plan("fedavg", "task.name=synthetic-histology")
    changed = make_plan("fedavg", "task.name=synthetic-histology", "network.norm=group")
    assert changed.network == own.network.model_copy(update={"norm": "group"})
    named = make_plan("fedavg", "task.name=synthetic-histology", "network.name=small-cnn", "network.norm=group")
    assert named.hash == changed.hash != own.hash
    with pytest.raises(MedsiloError, match=r"task\.size: 50 is not a multiple"):
        make_plan("fedavg", "task.name=synthetic-histology", "task.size=50", "network.norm=group")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "give a plan.yaml"),
        ("folder", "it is a folder; give a plan.yaml"),
        (b"seed: 1\nwords: \xf6\n", "UTF-8 (byte 0xF6 in line 2)"),
    ],
)
def test_a_plan_that_cannot_be_read_says_why(tmp_path: Path, content: Any, why: str) -> None:
    path = tmp_path / "own.yaml"
    if content == "folder":
        path.mkdir()
    elif content:
        path.write_bytes(content)
    with pytest.raises(MedsiloError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(path.name) and why in str(caught.value)


# ---------------------------------------------------------------------------------------------------- the data
def test_data_that_are_not_there_are_missed_before_nvflare_starts(here: Path, capsys: pytest.CaptureFixture) -> None:
    folder = here / "nowhere"
    line = one_line(capsys, 1, "run", "jobs/fedavg", "--set", "task.name=prostate", "--data", folder)
    assert "the data folder does not exist" in line and line.endswith(f"[{folder}]")
    assert "task prostate needs data" in one_line(capsys, 1, "run", "jobs/fedavg", "--set", "task.name=prostate")
    assert not (here / "runs").exists()
    compare = ["compare", "--task", "prostate", "--methods", "local", "--seeds", "0"]
    assert "task prostate needs data" in one_line(capsys, 1, *compare)
    assert not list(here.glob("runs/compare/local*"))


# ---------------------------------------------------------------------------------------------------- names


# ---------------------------------------------------------------------------------------------------- the start
def test_the_start_is_never_silent_for_long(tmp_path: Path) -> None:
    record, said, now = Record(tmp_path), [], [0.0]
    old = paths.site_folder(tmp_path, "b") / paths.DIARY
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, (1, 1))
    starting = Starting(record, ["a", "b"], said.append, lambda: now[0])
    for now[0] in range(0, 20):
        starting.look()
    assert said == [f"still starting ({seconds} s): the server, a, b" for seconds in (6, 12, 18)]
    record.checkpoints.mkdir()
    starting.look()
    for site in "ab":
        path = paths.site_folder(tmp_path, site) / paths.DIARY
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    starting.look()
    for now[0] in range(20, 60):
        starting.look()
    assert said[3:] == ["ready: the server", "ready: a, b"]


def test_as_many_sites_work_at_once_as_memory_has_room_for() -> None:
    plan = make_plan("fedavg", sites=[f"h{place:03}" for place in range(144)])
    some, all_of_them = Needs.of(plan, None, 4 << 30), Needs.of(plan, None, 64 << 30)
    assert (all_of_them.threads, 1 < some.threads < 144, some.memory <= 4 << 30) == (144, True, True)
    assert all_of_them.text.startswith("144 of 144 sites at a time, each a process: about 20")
    assert Needs.of(plan, None, 0).threads == 1
    assert (Needs.of(plan, 3, 0).threads, Needs.of(plan, 999, 0).threads) == (3, 144)
    assert "3 of 144 sites at a time, each a process" in Needs.of(plan, 3, 0).text


# ---------------------------------------------------------------------------------------------------- other commands
@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("run jobs/fedavg/plan.yaml", 1, ["jobs/fedavg,", "--plan"]),
        ("run jobs/fedavg --set training.rounds 3", 2, ["write --set training.rounds=3"]),
        ("run jobs/fedavg training.rounds=3", 2, ["write --set training.rounds=3"]),
        ("run jobs/fedavg --gpu 1", 2, ["write --device cuda:1"]),
        ("compare --gpu=0", 2, ["write --device cuda:0"]),
        ("run fedavg --min_clients 2", 2, ["--set participation.minimum=VALUE"]),
        ("run fedavg -n 3", 2, ["--set participation.minimum=VALUE"]),
        ("run fedavg --set num_rounds=3", 1, ["training.rounds"]),
        ("run fedavg -t 3", 2, ["--threads"]),
        ("run fedavg fedbn", 2, ["one JOB"]),
        ("compare --methods local fedavg", 2, ["local,fedavg"]),
        ("kits backup --kit server", 2, ["KIT without --kit"]),
        ("release make --run one", 2, ["RUNS without --run"]),
        ("run --hlep", 2, ["did you mean --help"]),
        ("provision project.yml", 2, ["medsilo kits make"]),
        ("run study", 1, ["medsilo init study"]),
        ("run fedavg --plan table.csv", 1, ["plan.yaml"]),
        ("train jobs/fedavg", 2, ["medsilo run JOB"]),
        ("log", 2, ["medsilo status ID --watch"]),
        ("start", 2, ["medsilo run JOB", "medsilo submit JOB", "startup/start.sh"]),
        ("stop", 2, ["medsilo cancel ID", "startup/stop_fl.sh"]),
        (
            "run jobs/fedavg --set task.name=image-folder --set task.kind=classification --set task.labels=[a,b] "
            "--set task.size=[32,32] --set network.name=small-cnn --data table.csv",
            1,
            ["a file", "give the file's folder", "data.table"],
        ),
        ("compare --methods local~fedavg", 1, ["commas", "local,fedavg"]),
        ("init blank.csv", 1, ["no column names", "first line"]),
        ("init blank.csv -o other", 1, ["blank.csv"]),
        ("resume study", 1, ["medsilo compare", "-o study", "repeat"]),
        ("list fedbm", 1, ["did you mean"]),
        ("run jobs/fedavg --rounds 3", 2, ["--set training.rounds=VALUE"]),
        ("run jobs/fedavg --set participation.sites=a,b", 1, ["'a,b' is not a list"]),
        ("predict study x.png -o out", 1, ["one of its runs, like fedavg-0"]),
        ("release export study -o out", 1, ["one of its runs, like fedavg-0"]),
        ("predict study x.png -o done", 1, ["already has predictions"]),
        ("kits make other.yaml -o kits", 1, ["name, server, hospitals, people"]),
        ("kits make half.yaml -o kits", 1, ["more"]),
    ],
)
def test_the_first_hour(here: Path, line: str, code: int, words: list[str], capsys: pytest.CaptureFixture) -> None:
    """Wrong commands that are typical of new users give an error with the cause and the remedy."""
    (here / "study/fedavg-0").mkdir(parents=True)
    (here / "done").mkdir()
    for file in ("study/verdict.json", "study/fedavg-0/plan.yaml", "done/predictions.csv", "blank.csv"):
        (here / file).touch()
    (here / "table.csv").write_text("image,label\n")
    (here / "other.yaml").write_text("".join(f"key{number}: {'long ' * 20}\n" for number in range(40)))
    (here / "half.yaml").write_text("server: {}\n" + (here / "other.yaml").read_text())
    assert cli.main([word.replace("~", " ") for word in line.split()]) == code
    told = capsys.readouterr().err.splitlines()[-1]
    assert all(word in told for word in words) and len(told) < 800, told
    assert not (here / "out").exists()


def test_a_server_that_is_silent_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command prints the server's address before waiting for the server, even if the output is a file or a pipe."""
    (kit := tmp_path / "lead@x.org").mkdir()
    (kit / "startup").mkdir()
    files = {"client_cert": "client.crt", "client_key": "client.key", "ca_cert": "rootCA.pem"}
    admin = {**files, "username": "lead@x.org", "host": "localhost", "port": 8002}
    (kit / "startup/fed_admin.json").write_text(json.dumps({"admin": admin}))
    heard = []

    def waits(*_: object) -> None:
        heard.append(capsys.readouterr().err)
        raise MedsiloError("nobody")

    monkeypatch.setattr("medsilo_lab.consortium.lead.connect", waits)
    for line in ("status", "cancel 1", "download 1"):
        assert cli.main([*line.split(), "--kit", str(kit)]) == 1
    assert len(heard) == 3 and all("trying localhost:8002" in one and "15 s" in one for one in heard)


def test_a_server_that_answers_too_late_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare's own error about a late answer ends with "timeout:" and names no server."""
    monkeypatch.setattr("medsilo_lab.consortium.lead.read_kit", lambda *_: SimpleNamespace(name="l", host="h", port=1))
    late = FLCommunicationError("failed to challenge server: timeout: ")
    monkeypatch.setattr("medsilo_lab.consortium.lead.connect", Mock(side_effect=late))
    with pytest.raises(lead.Unreachable, match="h:1.*is it started"), lead.connected(tmp_path):
        pass


def test_a_server_that_fell_silent_after_it_was_reached_is_not_taken_for_one_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says that a connected server stopped answering, possibly for lack of memory."""
    monkeypatch.setattr("medsilo_lab.consortium.lead.read_kit", lambda *_: SimpleNamespace(name="l", host="h", port=1))
    monkeypatch.setattr("medsilo_lab.consortium.lead.connect", Mock())
    with pytest.raises(lead.Unreachable, match="h:1 does not answer any more.*full"), lead.connected(tmp_path):
        raise NoConnection("cannot connect to server: failed to submit")


@pytest.mark.parametrize("over", [True, False])
def test_an_abort_waits_for_the_jobs_end_but_not_for_ever(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare's abort of a job returns before the job has ended.

    The lead's command waits for the job's end, because the server rejects `resume` of a running job.
    """
    states = iter(["RUNNING", "RUNNING", "FINISHED:ABORTED"] if over else repeat("RUNNING"))
    asked = list[Any]()

    def tell(*told: Any) -> None:
        asked.append(told)
        raise JobNotRunning("it is starting")

    session = SimpleNamespace(
        do_app_command=tell, abort_job=asked.append, get_job_meta=lambda job: {"status": next(states)}
    )
    monkeypatch.setattr(lead, "connected", lambda kit, answer=None: nullcontext(session))
    monkeypatch.setattr(lead, "read_kit", lambda *_: SimpleNamespace(name="lead@clinic"))
    monkeypatch.setattr(lead, "POLL", 0.01)
    monkeypatch.setattr(lead, "ENDING", 0.05)
    said: list[str] = []
    if over:
        assert lead.cancel("the-job", Path(), said.append) == "FINISHED:ABORTED"
    else:
        with pytest.raises(MedsiloError, match=r"the-job is still RUNNING.*medsilo status the-job --watch"):
            lead.cancel("the-job", Path(), said.append)
    (line,) = said
    assert "the-job" in line
    assert asked == [("the-job", "medsilo.progress", {"cancels": "lead@clinic"}), "the-job"]


def test_a_download_goes_on_into_its_own_folder_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download of a resumed study goes into the study's earlier folder, which no other study overwrites."""
    left = "job-1"

    def bring(job: str, folder: str) -> str:
        run = Path(folder, "got/workspace/medsilo/lungs")
        run.mkdir(parents=True)
        (run / paths.JOBS).write_text(left)
        (run / paths.SUMMARY).write_text(left)
        return str(run.parents[2])

    session = SimpleNamespace(get_job_status=lambda job: lead.COMPLETED, download_job_result=bring)
    monkeypatch.setattr(lead, "connected", lambda kit, answer=None: nullcontext(session))
    own = lead.download("job-1", tmp_path, tmp_path / "runs")
    (own / "notes.txt").write_text("mine")
    left = "job-1\njob-2\n"
    assert lead.download("job-2", tmp_path, tmp_path / "runs") == own
    assert (own / paths.SUMMARY).read_text() == left and (own / "notes.txt").read_text() == "mine"
    for spoil in (
        lambda: (own / "global").symlink_to(tmp_path),
        lambda: (own / paths.JOBS).write_text("job-7"),
        (own / paths.JOBS).unlink,
    ):
        spoil()
        with pytest.raises(MedsiloError, match="not an earlier download of this study"):
            lead.download("job-2", tmp_path, tmp_path / "runs")
        (own / "global").unlink(missing_ok=True)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["lungs"]


@pytest.mark.parametrize("line", ["help", "-h", "help run", "run -h", "nnunet -h", "version", "-V", "--version"])
def test_help_and_version_in_every_spelling(line: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(line.split()) == 0
    assert ("Usage: medsilo" in capsys.readouterr().out) == ("ersion" not in line and "V" not in line)


def test_a_terminal_of_few_letters_and_a_full_disk_cost_no_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def medsilo(*words: str) -> tuple[int, str, str]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True) for _ in range(2)]
        # the commands change the process's umask and signal handler
        umask, handler = os.umask(0o022), signal.getsignal(signal.SIGTERM)
        try:
            with monkeypatch.context() as patch:
                for name, value in {"argv": ["medsilo", *words], "stdout": streams[0], "stderr": streams[1]}.items():
                    patch.setattr(sys, name, value)
                code = cli.main()
        finally:
            os.umask(umask)
            signal.signal(signal.SIGTERM, handler)
        out, err = (stream.buffer.getvalue().decode("ascii") for stream in streams)  # type: ignore[attr-defined]
        return code, out, err

    code, out, err = medsilo("check", "--data", "nowhere")
    assert code == 1 and "-> " in out and "Traceback" not in err
    code, _, err = medsilo("approve", "--kit", "x" * 300)
    assert code == 1 and err.startswith("medsilo: ") and "Traceback" not in err
    save = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9)); from medsilo_lab.report.template"
    code = f"{save} import save; from pathlib import Path; save('x' * 99, Path('page.html'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "NoRoom: page.html could not be written" in done.stderr


# ---------------------------------------------------------------------------------------------------- the first hour
@pytest.mark.parametrize(
    ("command", "answers"),
    [
        ("run train.py", ["train.py is a script", "medsilo docs research/own-script"]),
        ("check data", ["data is a folder", "medsilo init data"]),
        ("compare --sweep mu=1", ["--methods fedprox:mu=0.1,fedprox:mu=1"]),
        ("restore", ["use medsilo kits restore"]),
        ("make", ["use medsilo kits make or medsilo release make"]),
        ("run fedavg --set training.precision=fp16", ["training.precision", "medsilo.yaml"]),
        ("prune /", ["give the folder of runs"]),
        ("prune ~", ["give the folder of runs"]),
        ("prune data", ["data contains no runs"]),
    ],
)
def test_what_is_typed_in_the_first_hour_gets_the_command_that_was_meant(
    command: str, answers: list[str], here: Path, capsys: pytest.CaptureFixture
) -> None:
    (here / "train.py").touch()
    write_pixels(here / "data/images/1.png", photograph(1)[0])
    words = [str(Path.home()) if word == "~" else word for word in command.split()]
    usage = command.startswith(("check", "compare", "restore", "make"))
    line = one_line(capsys, 2 if usage else 1, *words)
    assert all(answer in line for answer in answers), line


def test_a_folder_of_anything_is_not_walked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prune` searches only a few levels of folders, but finds the runs of a comparison and of a kit."""
    walked = list[str]()
    monkeypatch.setattr("medsilo.runs.clean.os.walk", lambda folder: walked.append(folder) or iter(()))
    (tmp_path / "data/a/b/c/d/e/checkpoints").mkdir(parents=True)
    assert cli.main(["prune", str(tmp_path / "data")]) == cli.main(["prune", "/"]) == 1
    assert not walked
    (tmp_path / "runs/compare/fedavg-0/checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert cli.main(["prune", str(tmp_path / "runs")]) == cli.main(["prune", str(tmp_path / "empty")]) == 0
    assert len(walked) == 2


@pytest.mark.slow
def test_disclosure_takes_a_run_and_a_hospital(here: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "local", "--set", "training.rounds=1", "--engine", "inprocess", "--name", "own"]) == 0
    site = load_plan(here / "runs/own/plan.yaml").participation.everyone[0]
    (here / "settings" / site).mkdir(parents=True)
    (here / "settings/medsilo.yaml").write_text("min_patients_per_metric: 5\n")
    (here / "settings" / site / "medsilo.yaml").write_text("min_patients_per_metric: 11\n")
    capsys.readouterr()

    def lines(*more: str) -> list[str]:
        assert cli.main(["disclosure", "runs/own", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["lines"]

    assert lines("--settings", "settings") != lines("--settings", "settings", "--site", site)
    assert "no-such" in one_line(capsys, 1, "disclosure", "runs/own", "--site", "no-such")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("training.round=3", "training.round: unknown key with value 3; remove it (did you mean rounds?)"),
        ("task.fold.nr=1", "task.fold.nr: unknown key with value 1; remove it or use one of: number, of"),
        ("task.foo=1", "task.foo: unknown key with value 1; remove it or use one of: name, fold, "),
        ("network.foo=1", "network.foo: unknown key with value 1; remove it or use one of: name, hidden, "),
    ],
)
def test_a_key_that_no_plan_has_is_refused_before_torch_is_loaded(here: Path, wrong: str, told: str) -> None:
    for command in ("run fedavg", "check fedavg --site a", "disclosure fedavg", "compare", "submit fedavg --out job"):
        assert told in _refused(here, f"{command} --set {wrong}", 2 if "check" in command else 1)


def test_a_key_of_another_method_than_the_plans_is_refused_before_torch_is_loaded(here: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text((here / "jobs/fedprox/app/config/plan.yaml").read_text())
    told = "algorithm.mu: unknown key with value 1; remove it or use one of: name, weighting, amplitude, perturbation"
    assert told in _refused(here, "run fedbn --set algorithm.mu=1")
    assert told in _refused(here, "run fedprox --set algorithm.mu=1 --set algorithm.name=fedbn")
    assert told in _refused(here, f"run fedavg --plan {other} --set algorithm.mu=1")
    check_keys(["algorithm.mu=1"], as_written("fedprox", None))
    check_keys(["algorithm.mu=1"], as_written("no-such-job", None))


def _refused(folder: Path, command: str, code: int = 1) -> str:
    program = (
        f"import sys, time; from medsilo import cli; code = cli.main({command.split()!r});"
        "print(code, 'torch' in sys.modules, 'nvflare' in sys.modules, time.process_time())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, timeout=600)
    *found, spent = ended.stdout.split()
    # the command takes 0.3 s of processor time on an idle machine
    assert found == [str(code), "False", "False"] and float(spent) < 3, ended.stdout + ended.stderr
    return ended.stderr


def test_keys_that_are_read_in_sources_are_those_of_the_classes() -> None:
    named = {table.written_in(name): table[name] for table in (*TABLES.values(), LAYERS) for name in table.ours}
    for place, kind in {PLAN_CLASS: Plan, SETTINGS: SiteSettings, **named}.items():
        found = keys_in_source(place)
        if kind not in (Tuned, FrozenNetwork):  # Python does not allow an attribute with the name of the key `from`
            assert found and [*found.keys] == [*kind.model_fields], place
        for key in found.keys if found else ():
            within = found and found.below([key])
            kinds = [*_sections_in(kind.model_fields[key].annotation)]
            assert within is None or (len(kinds) == 1 and [*within.keys] == [*kinds[0].model_fields]), (place, key)
    assert {key for key, keys in keys_of_plans().items() if keys} == {
        *("study", "training", "participation", "aggregation", "secure_aggregation", "transport"),
        *("model_selection", "privacy"),
    }


def test_keys_that_a_source_does_not_say_are_left_to_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "oddly"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (package / "base.py").write_text(
        "from medsilo.extend import Algorithm\n\nclass Own(Algorithm):\n    mine: int = 1\n"
    )
    (package / "odd.py").write_text(
        "from .base import Own\nfrom medsilo.extend import Algorithm\nimport medsilo.extend as m\n"
        "class Plain(Own):\n    more: int = 2\n    _hidden: int = 3\n"
        "class Renamed(Own):\n    more: int = Field(2, alias='other')\n"
        "class Early(Own):\n    @model_validator(mode='before')\n    def _take(cls, values): ...\n"
        "class Open(Own):\n    model_config = ConfigDict(extra='allow')\n"
        "class Made(create_model('Base')):\n    more: int = 2\n"
        "class Around(Around):\n    more: int = 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plain = keys_in_source("oddly.odd:Plain")
    assert plain and [*plain.keys] == ["name", "weighting", "amplitude", "perturbation", "mine", "more"]
    for name in ("Renamed", "Early", "Open", "Made", "Around", "Absent"):
        assert keys_in_source(f"oddly.odd:{name}") is None, name
    assert keys_in_source("nowhere.at.all:Plan") is None and keys_in_source("") is None


def test_what_submit_needs_is_loaded_once_and_nvflare_first(here: Path, tmp_path: Path) -> None:
    """If `medsilo submit` imported torch before NVFlare, NVFlare and the garbage collector would search torch's many
    modules and objects.
    """
    program = (
        "import gc, sys; from medsilo import cli; looks = [];"
        "gc.callbacks.append(lambda phase, facts: looks.append(facts['generation'] == 2 and 'torch' in sys.modules));"
        "code = cli.main(['submit', 'fedavg', '--kit', 'no-kit']);"
        "names = [*sys.modules]; print(code, names.index('nvflare') < names.index('torch'), any(looks))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=here, timeout=600)
    assert ended.stdout.split() == ["1", "True", "False"], ended.stdout + ended.stderr
