"""Test the command line: errors of one line that name the remedy, JSON output with --json, and a --help that is
complete and fast.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from medsilo.cli import all_commands, main
from medsilo.cli.show import Console
from medsilo.runs.progress import StudyProgress, round_lines
from medsilo.runs.rounds import Round, SiteRound
from tests.commands import parsed, processor_seconds
from tests.conftest import pace

NAMES = [one.name for commands in all_commands().values() for one in commands]
SMALL = ["--set", "task.patients=6", "--set", "task.size=32", "--set", "training.rounds=2", "--device", "cpu"]


def one_line(capsys: pytest.CaptureFixture, code: int, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("medsilo: ")
    return line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "give a command"),
        ("comapre", "did you mean compare?"),
        ("Run jobs/fedavg", "did you mean run?"),
        ("nonsense", "'nonsense' is no command ("),
        ("--versoin", "did you mean --version?"),
        ("run", "JOB is missing: a job's folder"),
        ("run jobs/fedavg --devcie cpu", "no option --devcie; did you mean --device?"),
        ("run jobs/fedavg -x 3", "no option -x"),
        ("run jobs/fedavg extra", "extra is not expected here"),
        ("run jobs/fedavg --out", "--out needs a value"),
        ("run jobs/fedavg --json=3", "--json takes no value"),
        ("run jobs/fedavg --threads 0", "--threads: give a number greater than or equal to 1"),
        ("run jobs/fedavg --engine inproces", "is not one of 'simulator', 'inprocess'"),
        ("compare --seeds a,b", "--seeds: 'a,b' is not a list of different numbers, like 0,1,2"),
        ("compare --seeds 1,1", "is not a list of different numbers"),
        ("demo --seeds x", "--seeds: 'x' is not a list of different numbers"),
        ("download ID", "--kit is missing: your own kit"),
        ("nnunet plann", "nnunet: 'plann' is no command; did"),
        ("nnunet plan question.yaml --outt x", "nnunet plan: there is no option --outt; did you mean --out?"),
        ("disclosure jobs/fedavg --json leaks.json", "to keep the JSON in a file, write --json > FILE"),
    ],
)
def test_wrong_use_is_one_line_with_the_remedy(line: str, words: str, capsys: pytest.CaptureFixture) -> None:
    told = one_line(capsys, 2, *shlex.split(line))
    assert words in told
    words = line.split()
    known = (" ".join(words[:2]), *words[:1])
    where = next((f"medsilo {name}" for name in known if name in {*NAMES, "nnunet"}), "medsilo")
    assert told.endswith(f"('{where} --help' explains)")


@pytest.mark.parametrize(
    ("command", "way"),
    [
        ("run jobs/fedavg --out", "file/x"),
        ("run jobs/fedavg -o", "file"),
        ("compare --out", "file/x"),
        ("demo --out", "file"),
        ("demo --out", "/proc/x"),
        ("download ID --kit KIT --out", "file/x"),
        ("submit jobs/fedavg --out", "file/x/y"),
        ("kits make consortium.yaml --out", "file"),
        ("report run --out", "file/x.html"),
        ("report run --out", "folder"),
        ("predict model image --out", "file/x"),
        ("release export model --out", "file/x"),
        ("check --private", "file/x.txt"),
    ],
)
def test_a_place_that_takes_no_files_is_told_before_anything_starts(
    command: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert f"{way} can't be written: " in one_line(capsys, 2, *command.split(), way)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tmp_path.chmod(0o500)
    assert "permission denied" in one_line(capsys, 2, "demo", "--out", tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Süd Klinik", "Süd#Klinik", "it's"])
def test_a_path_that_nvflare_would_tear_apart_is_told_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """medsilo rejects paths with spaces, quotes or #, because NVFlare does not quote paths in command lines.

    The engine in one process works without NVFlare, and accepts paths with spaces and quotes.
    """
    told = one_line(capsys, 1, "run", "fedavg", "--out", tmp_path / name)
    assert "choose another --out, or give --engine inprocess" in told and str(tmp_path / name) in told
    assert not list(tmp_path.rglob("*.yaml"))
    assert main(["run", "fedavg", "--engine", "inprocess", "--out", str(tmp_path / name), *SMALL]) == 0


@pytest.mark.parametrize("line", ["run fedavg", "submit fedavg --kit KIT", "kits make consortium.yaml -o kits"])
def test_another_nvflare_is_told_with_what_to_install(line: str, root: Path, tmp_path: Path) -> None:
    """If another version of NVFlare is installed, the error names the version to install."""
    told = tmp_path / "packages/nvflare-2.8.0.dist-info/METADATA"
    told.parent.mkdir(parents=True)
    told.write_text("Metadata-Version: 2.1\nName: nvflare\nVersion: 2.8.0\n")
    (tmp_path / "consortium.yaml").write_text((root / "provisioning/consortium.yaml").read_text())
    seen = {**os.environ, "PYTHONPATH": os.pathsep.join((str(told.parents[1]), str(root / "custom")))}
    command = [sys.executable, "-m", "medsilo", *line.split()]
    done = subprocess.run(command, cwd=tmp_path, env=seen, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"nvflare is 2\.8\.0 .*pip install nvflare==2\.9", done.stderr.splitlines()[-1])


WRONG = """
compare --at-once x | --at-once: give a whole number (
compare --methods fedavg --folds 1 | --folds: give a number greater than or equal to 3
compare --row "a: training.rounds" | is not 'TITLE: KEY=VALUE ...'
compare --at-once 0 | --at-once: give a number greater than or equal to 1
compare --task nothing --methods local | did you mean|choose one of
compare --plan nothing --methods local | no job at nothing: it needs app/config/plan.yaml
compare | give --methods local,fedavg
run jobs | it needs app/config/plan.yaml; jobs in it: adafed
run jobs/fedavg --set | --set needs a value
run jobs/fedavg --set seed | write it as key.subkey=value
run jobs/fedavg --set seed=-1 | seed: -1 is too small; give 0 or more
run jobs/fedavg --set nothing.x=1 | nothing: unknown key
run jobs/fedavg --set algorithm=fedbn | set algorithm.name=fedbn
run jobs/fedavg --set training.optimizer=[] | training.optimizer: [] is
run jobs/fedavg --device gpu | use auto, cpu, cuda
run jobs/fedavg --settings nothing | give the folder that holds medsilo.yaml [nothing]
run jobs/central | --engine inprocess
resume nothing | nothing is not a run folder; give a folder
report nothing | give the folder that holds summary.json [nothing]
report jobs | has no summary.json
withdraw nothing | 'withdraw' is no command
release test nothing --as st-anna --lead X | there is no release.json; give the folder or file that was signed
prune nothing | give one like runs/ [nothing]
prune . --older-than x | --older-than: give a number
init | give the folder of your data; 'medsilo example FOLDER' writes
example | FOLDER is missing
canary | --kit is missing
submit --canary --kit jobs | there is no option --canary
init nothing | the folder does not exist
predict nothing scan.nii.gz -o out | the folder does not exist
predict jobs scan.nii.gz -o out | give a folder with supermodel.json or plan.yaml [jobs]
release export jobs | --out is missing
release export jobs --to x -o out | choose one of monai, nnunet
check jobs/fedavg --kit jobs | the folder is not a kit
check nothing | no job at nothing
check jobs/fedavg --set participation.sites=[a,b] | the name of this site is not known; give --site
disclosure jobs/fedavg --settings nothing | there is no such folder of settings
approve jobs/fedavg --kit nothing | there is no such folder; give the folder of a kit [nothing]
approve x --kit jobs --expires soon | write hours, days or weeks
page --kit jobs --port x | --port: give a whole number
ledger | --kit is missing: this site's kit
ledger nonsense --kit jobs | is not one of 'show', 'accept'
kits make nothing -o kits | nothing cannot be read: there is no such file; give a consortium.yaml
kits make | CONSORTIUM is missing
kits mak x | did you mean make
release tets x | did you mean test
submit jobs/fedavg --kit nothing | there is no such folder; give the folder of a kit [nothing]
status --kit jobs | the folder is not a kit: its startup/ contains none of
cancel x | --kit is missing
kits backup nothing -o x.zip | only a server can be backed up; give the server's kit [nothing]
kits restore nothing --kit x | nothing is not there; use the file that medsilo kits backup wrote
kits rehearse | kits: 'rehearse' is no command
disclosure jobs/fedvag | did you mean jobs/fedavg?
submit jobs/fedavg | where to? give --kit to submit the job, or --out
submit jobs/fedavg --kit kit --out out | where to?
status --watch --kit kit | which job?
disclosure fedavgg | did you mean fedavg?
disclosure jobs/central | medsilo compare --methods central
predict run image -o out --device cuda:99 | device cuda:99: this machine has
report nowhere | There is no run folder
""".strip().splitlines()


@pytest.fixture
def place(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").symlink_to(root / "jobs")
    return tmp_path


@pytest.mark.slow
def test_wrong_lines_are_one_line_with_the_remedy(place: Path, capsys: pytest.CaptureFixture) -> None:
    """A wrong command writes no file, and prints one line with the remedy, or a JSON document with --json."""
    before = sorted(place.iterdir())
    for row in WRONG:
        line, _, wanted = row.partition(" | ")
        code = main(shlex.split(line))
        told = capsys.readouterr().err.splitlines()
        assert code in (1, 2) and len(told) == 1 and told[0].startswith("medsilo: "), (line, told)
        assert any(words in told[0] for words in wanted.split("|")) and len(told[0]) < 800, (line, told[0])
        words = shlex.split(line)
        acts = 2 if words[0] in ("kits", "nnunet", "release") else 1
        assert main([*words[:acts], "--json", *words[acts:]]) == code, line
        document = json.loads(capsys.readouterr().out)
        assert {"error", "code", "kind"} <= document.keys() and document["code"] == code, line
        assert document["error"] in told[0], line
    assert sorted(place.iterdir()) == before


def test_a_folder_of_another_kind_is_refused_before_anything_is_written(
    place: Path, capsys: pytest.CaptureFixture
) -> None:
    kit = place / "kit/startup"
    kit.mkdir(parents=True)
    of_server = {"service": {"target": "a:1"}, "ssl_cert": "", "ssl_private_key": "", "ssl_root_cert": ""}
    (kit / "fed_server.json").write_text(json.dumps({"servers": [of_server]}))
    (place / "run").mkdir()
    (place / "run/plan.yaml").touch()
    for line, wanted in {
        "run jobs/fedavg --settings jobs": "has no medsilo.yaml; give a folder with medsilo.yaml [jobs]",
        "compare --methods local -o run": "--out is the folder of a run; give another folder [run]",
        "approve jobs/fedavg --kit kit": "this kit belongs to a server; give the kit of a hospital [kit]",
    }.items():
        assert main(line.split()) == 1, line
        assert wanted in capsys.readouterr().err, line
    assert sorted(path.name for path in place.iterdir()) == ["jobs", "kit", "run"]


# ---------------------------------------------------------------------------------------------------- options
def test_every_folder_to_write_is_given_by_both_names(capsys: pytest.CaptureFixture) -> None:
    writing = []
    for name in NAMES:
        assert main([*name.split(), "--help"]) == 0
        text = capsys.readouterr().out
        assert "--json" in text, name
        assert ("--out" in text) == ("-o, --out" in text), name
        places = text.partition("\n\n")[0].partition("[OPTIONS]")[2]
        assert places == places.upper() and not re.search(r"--[a-z-]+ [<{]", text), name
        writing += [name] if "--out" in text else []
    assert len(writing) == 16


def test_help_names_every_command_whole(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    first = {name.partition(" ")[0] for name in NAMES}
    most = 25  # the largest number of commands, without commands of plug-ins
    assert len(first - {"nnunet"}) <= most, (
        "too many commands: make the new command an action of another command (Command's `of`)"
    )
    for name in first:
        assert re.search(rf"^  {name}  ", text, re.MULTILINE), name
    assert "..." not in text.replace("[ARGS]...", "")


def test_examples_of_help_are_right(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for commands in all_commands().values():
        for one in commands:
            assert parsed([*one.name.split(), *shlex.split(one.example)])[0] == one.name


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_is_quick(arguments: list[str]) -> None:
    """The option --help should take 0.3 s of processor time on an idle machine; the test's limit is higher, because
    machines differ in speed.
    """
    assert processor_seconds(arguments) < 0.6 * pace()


# ---------------------------------------------------------------------------------------------------- completion
def test_names_are_completed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    environment = {"_MEDSILO_COMPLETE": "complete_bash", "COMP_WORDS": "medsilo nnunet p", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "medsilo"], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["plan"]
    # Typer would take the parent process for the shell, but the test's parent may be no shell.
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    words = [sys.executable, "-m", "medsilo", "--show-completion", "bash"]
    shown = subprocess.run(words, env=named, capture_output=True)
    assert b"_MEDSILO_COMPLETE" in shown.stdout


# ---------------------------------------------------------------------------------------------------- JSON
def test_a_run_as_json_lines_and_its_page(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(root)
    place = ["--out", str(tmp_path), "--engine", "inprocess"]
    assert main(["run", "fedavg", *place, "--name", "one", *SMALL, "--json"]) == 0
    heard = capsys.readouterr()
    lines = [json.loads(line) for line in heard.out.splitlines()]
    assert [line["event"] for line in lines] == ["round", "round", "outcome"]
    assert [line["round"] for line in lines[:2]] == [1, 2] and {line["of"] for line in lines[:2]} == {2}
    assert lines[2]["code"] == 0 and lines[2]["summary"]["status"] == "finished"
    assert Path(lines[2]["report"]).is_file() and Path(lines[2]["run"]) == tmp_path / "one"
    assert "round 2/2" in heard.err and heard.err.startswith("reading the plan of fedavg\n")

    assert main(["run", "fedavg", *place, "--name", "one", *SMALL, "--json"]) == 1
    (outcome,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert outcome["event"] == "outcome" and outcome["code"] == 1 and "exists" in outcome["error"]

    for line, key in (
        (f"report {tmp_path} -o {tmp_path}/all.html", "report"),
        ("disclosure jobs/fedavg --set training.rounds=2", "groups"),
        (f"submit jobs/fedavg -o {tmp_path}/job", "job"),
        (f"release export {tmp_path}/one -o {tmp_path}/bundle", "error"),
        ("list", "tasks"),
    ):
        code = main([*line.split(), "--json"])
        assert code == (key == "error"), line
        assert json.loads(capsys.readouterr().out)[key], line
    assert (tmp_path / "all.html").read_text().count("FedAvg") > 0


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    from medsilo_lab.report.read import runs_within

    for name in ("b", "a"):
        (tmp_path / "demo" / name).mkdir(parents=True)
        (tmp_path / "demo" / name / "summary.json").touch()
    assert runs_within(tmp_path / "demo") == [tmp_path / "demo/a", tmp_path / "demo/b"]
    assert runs_within(tmp_path / "demo/a") == [tmp_path / "demo/a"]


# ---------------------------------------------------------------------------------------------------- progress
def record(number: int, score: float | None) -> Round:
    own = SiteRound(validation=score, train_loss=0.5, seconds=1.5, samples=4, bytes_up=8, bytes_down=8)
    states: dict[str, Any] = {"refused": {"b": "no data"}, "lost": {"c": "no answer"}, "warnings": {"a": ["slow disk"]}}
    return Round(round=number, asked=["a", "b", "c"], answered=["a"], sites={"a": own}, **states)


def test_progress_knows_the_sites_and_the_time_left() -> None:
    now = [100.0]
    progress = StudyProgress(["a", "b", "c"], 5, "dice", lambda: now[0])
    assert progress.seconds_left() is None and progress.states["a"] == "waiting"
    now[0] = 130.0
    assert progress.add(record(1, 0.4)) == round_lines(record(1, 0.4), 5, "dice")
    assert progress.seconds_left() == 30 * 4
    for number, score in ((2, 0.6), (3, 0.5)):
        now[0] += 10
        progress.add(record(number, score))
    assert progress.seconds_left() == 10 * 2
    assert progress.states == {"a": "answered", "b": "refused", "c": "lost"}


@pytest.mark.slow
def test_a_run_on_a_terminal_is_live(root: Path, tmp_path: Path) -> None:
    """On a pseudo-terminal, `medsilo run` prints its first words at once, and prints each round and the progress during
    the run.
    """
    import pty

    main_end, own_end = pty.openpty()
    command = [sys.executable, "-m", "medsilo", "run", "fedavg", "--engine", "inprocess", "--out", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen([*command, *SMALL], stdout=own_end, stderr=own_end, cwd=root, env=environment)
    os.close(own_end)
    seen = b""
    try:
        while part := os.read(main_end, 4096):
            seen += part
    except OSError:
        pass
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    # the output states the time for reading the plan only if this time is longer than a second
    text = re.sub(r"reading the plan of fedavg \(\d+ s\)\r\n", "", text)
    assert re.match("reading the plan of fedavg\r\n.*3 hospitals, 2 rounds\r\n", text)
    assert all(f"round {number}/2  hospital-a  " in text for number in (1, 2)) and "report: " in text
    assert "still starting" in text or "round 1 of 2" in text


# ---------------------------------------------------------------------------------------------------- a shell
SHELLS = {
    "bash": lambda words: {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
    "zsh": lambda words: {"_TYPER_COMPLETE_ARGS": words},
    "fish": lambda words: {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_jobs_methods_and_keys(shell: str, tmp_path: Path) -> None:
    for words, wanted in (
        ("medsilo comp", "compare"),
        ("medsilo run fedb", "fedbn"),
        ("medsilo list fedpr", "fedprox"),
        ("medsilo compare --methods local,fedb", "local,fedbn"),
        ("medsilo run fedavg --set training.rou", "training.rounds="),
        ("medsilo run --eng", "--engine"),
    ):
        own = {**os.environ, "_MEDSILO_COMPLETE": f"complete_{shell}", **SHELLS[shell](words)}
        program = Path(sys.executable).with_name("medsilo")
        said = subprocess.run(
            [program], env=own, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert wanted in said.stdout, (words, said)


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_colour_is_for_terminals_that_want_it(terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1" if quiet else "")
    screen = Console()
    screen.say("all is well", "warning: Untrained: none learned", "no warning: here")
    screen.warn("it failed")
    assert main(["nosuch"]) == 2
    said, wrong = sys.stdout.getvalue(), sys.stderr.getvalue()  # type: ignore[attr-defined]
    coloured = terminal and not quiet
    assert said.count("\x1b[") == 2 * coloured and wrong.count("\x1b[") == 4 * coloured
    plain_text = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert plain_text.splitlines() == ["all is well", "warning: Untrained: none learned", "no warning: here"]
