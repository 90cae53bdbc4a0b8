"""A training script gives the same result inside and outside of the airlock's sandbox, and only data that medsilo has
checked leave the sandbox.
"""

import json
import os
import socket
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from medsilo.airlock import inside, seccomp
from medsilo.airlock.border import HELD_BITS, LEFT
from medsilo.airlock.room import USER, Room, ability
from medsilo.airlock.seccomp import filter_program
from medsilo.airlock.site import PRINTED
from medsilo.airlock.study import StudyRoom, room_of
from medsilo.check.machine import check_airlock
from medsilo.check.spending import spent
from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, write_json, write_text
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import training_site
from medsilo.flare.airlock_executor import start_of, take_code_away
from medsilo.flare.kit_events import RefusingLauncher, launcher_of_code
from medsilo.plan import parse_plan
from medsilo.recipes import FedAvgRecipe
from medsilo.runs import paths
from medsilo.runs.messages import VARYING
from medsilo.runs.reading import read_rounds
from medsilo.runs.rounds import Round
from medsilo.site.airlock_settings import RoomSettings
from medsilo.site.job_code import as_brought
from medsilo.site.ledger import ledger_of, ledgers
from medsilo.site.query_budget import MESSAGES, PLACES, QueryBudget
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines.inprocess import Line
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.attacks.hostile_scripts import HERE
from tests.attacks.rooms import LEARNS, in_room, learning
from tests.conftest import make_plan
from tests.hospital import KEY, NAMES, write_photos
from tests.secure.consortium import wait_until
from tests.unit.site.test_data_sets import made, table

ROOT = Path(__file__).parents[3]

needs_room = pytest.mark.skipif(not ability().works, reason="no bubblewrap, or no user namespaces")


@needs_room
def test_a_script_learns_in_a_room(tmp_path: Path) -> None:
    ran = in_room(tmp_path, LEARNS)
    assert not ran.error, ran.error + ran.printed
    rounds = [line for line in ran.left if line["task"] == "round"]
    assert [line["tensors"] for line in rounds] == [9, 9] and rounds[0]["bits"]["tensors"] == 8 * rounds[0]["bytes"]


@pytest.mark.slow
@needs_room
@pytest.mark.parametrize("method", ["fedbn", "scaffold", "ditto"])
def test_a_new_room_goes_on_from_the_state_of_the_last(method: str, tmp_path: Path) -> None:
    """A study gives the same bits if the sandbox is killed between two answers and a new sandbox continues the study.

    The methods fedbn, scaffold and ditto keep state tensors at the site between rounds.
    """
    loop = LEARNS.replace(
        "    for x, y in batches:", "    for model_, optimizer_ in flare.networks():\n      for x, y in batches:"
    )
    loop = loop.replace("        optimizer.zero_grad()", "          optimizer_.zero_grad()")
    loop = loop.replace(
        "        nn.functional.cross_entropy(model(x)", "          nn.functional.cross_entropy(model_(x)"
    )
    loop = loop.replace("        optimizer.step()", "          optimizer_.step()")
    whole = in_room(tmp_path / "whole", loop, method=method, rounds=3)
    broken = in_room(tmp_path / "broken", loop, method=method, rounds=3, ends=2)
    assert not whole.error and not broken.error, whole.error + broken.error + broken.printed
    assert all(torch.equal(own, broken.model[name]) for name, own in whole.model.items())


RANKS = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
told = [None, None]
dist.all_gather_object(told, dist.get_rank())
data = TensorDataset(torch.arange(8.0))
read = sum(float(own.sum()) for (own,) in DataLoader(data, batch_size=2, num_workers=2))
print("ranks", told, "read", read, flush=True)
"""


@needs_room
@pytest.mark.slow
def test_several_processes_train_in_one_room(tmp_path: Path) -> None:
    """torchrun starts several processes in one sandbox; the processes communicate over the sandbox's internal network
    and start data loaders.
    """
    run = ("python3", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    ran = in_room(tmp_path, RANKS + LEARNS, {"room": {"scratch": 64, "processes": 400}}, command=run)
    assert not ran.error, ran.error + ran.printed
    assert ran.printed.count("ranks [0, 1] read 28.0") == 2


@pytest.mark.slow
@needs_room
@pytest.mark.parametrize(
    ("lines", "settings", "reason"),
    [
        ("import time; time.sleep(60)", {"room": {"hours": 0.0008}}, "longer than 0.0008 hours"),
        ("while True: pass", {"room": {"hours": 0.0008}}, "longer than 0.0008 hours"),
        (
            "import subprocess, time; all = [subprocess.Popen(['sleep', '60']) for _ in range(40)]; time.sleep(60)",
            {"room": {"processes": 20}},
            # the operating system does not limit the number of processes of root
            "ended before its answer" if os.getuid() else "more than 20 processes",
        ),
        ("held = bytearray(1 << 30)", {"memory_limit": 512}, "ended before its answer"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {}, "was killed"),
        ("import sys; sys.exit(3)", {}, "ended before its answer"),
        ("while True: flare.log('loss', 1.0, flare.AnalyticsDataType.SCALAR)", {}, "more than 10000 messages"),
    ],
)
def test_a_room_that_takes_too_much_ends_with_one_line(
    lines: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    ran = in_room(tmp_path, learning(lines), settings)
    assert reason in ran.error and "\n" not in ran.error, ran.error + ran.printed


@pytest.mark.slow
@needs_room
def test_a_room_ends_with_whoever_made_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.attacks.rooms import in_room, learning; "
        "in_room(Path(sys.argv[1]), learning('import time; print(1); time.sleep(600)'))"
    )
    site = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        printed = tmp_path / "a/study/sites/a/script.log"
        wait_until(lambda: printed.exists() and printed.read_text() == "1\n", 600, "the script")
        rooms = psutil.Process(site.pid).children(recursive=True)
        site.kill()
        assert rooms and not psutil.wait_procs(rooms, timeout=60)[1]
    finally:
        site.kill()
        site.wait()


@needs_room
def test_a_room_shows_no_folder_with_secrets_or_with_a_service(tmp_path: Path) -> None:
    """medsilo refuses to start a sandbox in which a script could read the hospital's own files, such as the ledger's
    key.

    medsilo rejects a readable folder that contains a Unix socket, because a script could use the service behind the
    socket.
    """
    shared = tmp_path / "shared"
    shared.mkdir()
    own: dict[str, Any] = {"public_data": False, "approval": "none", "room": {"scratch": 64, "reads": [str(shared)]}}
    ran = in_room(tmp_path / "state", LEARNS, {**own, "state_dir": str(shared / "state")}, rounds=1)
    assert "show a script this hospital's kit or results" in ran.error and not ran.printed
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(shared / "s"))
        ran = in_room(tmp_path / "service", LEARNS, own, rounds=1)
    assert "socket of a service of this machine" in ran.error and not ran.printed
    assert "shared" not in ran.error


def test_a_kit_among_the_systems_programs_stays_unseen() -> None:
    room = Room((), {}, RoomSettings(), 1 << 30, 1, private=(Path("/usr/local/kit"),))
    with pytest.raises(MedsiloError, match="this hospital's kit or results"):
        room.walls({}, None)
    assert os.getuid() != USER


@pytest.mark.slow
@needs_room
def test_all_rooms_of_a_study_share_one_limit_on_the_log(tmp_path: Path) -> None:
    lines = "print('x' * (17 << 20), flush=True)\n"
    ran = in_room(tmp_path, lines + LEARNS, rounds=2, ends=1)
    assert not ran.error and ran.printed.count("medsilo: the script printed more") == 2
    assert len(ran.printed) < 17 << 20


@needs_room
def test_a_script_that_says_that_it_lacks_a_file_is_counted(tmp_path: Path) -> None:
    lines = """
import medsilo.client as flare
from lead import door
flare.init()
head = door().receive()
door().tensors(head.tensors)
door().send("lacks")
"""
    ran = in_room(tmp_path, lines, files={"lead.py": (HERE / "lead.py").read_text()})
    assert "a pre-trained file" in ran.error or "ended before" in ran.error
    assert ran.left and all(line["bits"] == HELD_BITS for line in ran.left)


@needs_room
def test_a_border_clips_and_rounds_what_leaves(tmp_path: Path) -> None:
    ran = in_room(tmp_path, LEARNS, {"border": {"clip": 0.5, "bfloat16": True}}, rounds=1)
    begun, _ = load_tensors(tmp_path / "job/app/config/initial.safetensors")
    update = {name: own - begun[name] for name, own in ran.model.items() if own.is_floating_point()}
    assert not ran.error
    norm = sum(float(own.double().square().sum()) for own in update.values()) ** 0.5
    assert norm == pytest.approx(0.5, rel=0.01)
    (line,) = (line for line in ran.left if line["task"] == "round")
    assert line["norm"] > 0.5 and line["bits"]["tensors"] == 16 * 90 + 64


@pytest.mark.slow
@needs_room
def test_noise_lies_on_the_whole_update_and_its_price_is_written(tmp_path: Path) -> None:
    ran = in_room(tmp_path, LEARNS, {"border": {"clip": 0.1, "noise": 20}}, rounds=1)
    begun, _ = load_tensors(tmp_path / "job/app/config/initial.safetensors")
    update = {name: own - begun[name] for name, own in ran.model.items()}
    spread = torch.cat([own.flatten() for name, own in update.items() if own.is_floating_point() and "var" not in name])
    assert not ran.error and float(spread.std()) == pytest.approx(2.0, rel=0.4)
    assert ran.model["1.running_var"].min() >= 0 and not update["1.num_batches_tracked"]
    (line,) = (line for line in ran.left if line["task"] == "round")
    assert line["noise"]["rho"] == 0.5 / 20**2 and "not one patient" in line["noise"]["of"]
    with pytest.raises(MedsiloError, match="give clip"):
        SiteSettings.from_values({"border": {"noise": 1.0}}, "settings")


@pytest.mark.slow
@needs_room
def test_numbers_of_patients_data_leave_rounded(tmp_path: Path) -> None:
    lines = LEARNS.replace("flare.join(model, optimizer, batches", "flare.join(model, optimizer, batches, samples=43")
    lines = lines.replace('"accuracy": accuracy', '"accuracy": 0.123456')
    settings = {"public_data": False, "approval": "none", "border": {"digits": 2}}
    summary = in_room(tmp_path, lines, settings).record.summary()
    assert summary and summary.sites["a"].validation[0] == 0.1
    assert summary.sites["a"].cases["train"] == 40
    left = [json.loads(line) for line in next(tmp_path.rglob(LEFT)).read_text().splitlines()]
    (count,) = QueryBudget(next(tmp_path.rglob("_hospital")) / "a").counts().values()
    assert count.sent[MESSAGES] == len(left) == 5  # five messages: the join, two rounds, the final models and the test
    assert count.sent["tensors"] == 8 * sum(line["bytes"] for line in left) > 0 and count.answered["validation"] == 2
    told = Counter[str]()
    for line in left:
        told.update(line["bits"])
    assert told == {kind: bits for kind, bits in count.sent.items() if bits and kind != MESSAGES}


AS_LOSS = """
from medsilo.airlock.wire import End
own = End.send

def send(self, kind, groups=None, **head):
    facts = head.get("facts", {})
    if facts.get("validation") is not None:
        facts.update(validation=None, validation_loss=facts["validation"])
    own(self, kind, groups, **head)

End.send = send
"""


@pytest.mark.slow
@needs_room
def test_a_loss_in_place_of_a_score_is_an_answer_and_leaving_it_out_is_a_bit(tmp_path: Path) -> None:
    """A script can write any number into a loss, and can decide in each round whether to send a loss."""
    settings = {"public_data": False, "approval": "none"}
    for name, lines in {"loss": AS_LOSS + LEARNS, "none": LEARNS.replace('metrics={"accuracy": accuracy}', "")}.items():
        ran = in_room(tmp_path / name, lines, settings)
        assert not ran.error, ran.printed
        assert all(line.sites["a"].validation is None for line in read_rounds(ran.record.folder))
        (count,) = QueryBudget(next((tmp_path / name).rglob("_hospital")) / "a").counts().values()
        assert count.answered["validation"] == (2 if name == "loss" else 0)
        assert all((line["bits"]["metrics"] > 3) == (name == "loss") for line in ran.left if line["task"] == "round")
        assert all(line["bits"]["metrics"] >= 3 for line in ran.left if line["task"] == "round")


@pytest.mark.slow
@needs_room
def test_what_a_script_can_have_sent_is_signed(tmp_path: Path) -> None:
    """The signed ledger records all values that a script may have sent, the privacy cost of noise, and rejected
    answers.
    """
    settings = {"public_data": False, "approval": "none", "border": {"clip": 0.1, "noise": 2}}
    lines = LEARNS.replace("flare.join(model, optimizer, batches", "flare.join(model, optimizer, batches, samples=43")
    assert not in_room(tmp_path / "whole", lines, settings).error
    book = QueryBudget(next((tmp_path / "whole").rglob("_hospital")) / "a")
    (data,) = ledgers(book.folder)
    ledger = ledger_of(book, data, None)
    (study,) = spent(ledger, None)["studies"]
    assert study["script"]["messages"] == 5 and study["script"]["update_rho"] == 2 * 0.5 / 2**2
    (count,) = book.counts().values()
    assert study["script"]["bits"] == {kind: n for kind, n in count.sent.items() if kind != MESSAGES}
    text = ledger.file.read_text()
    ledger.file.write_text(text.replace('"tensors":', '"tensors":1', 1))
    with pytest.raises(MedsiloError, match="changed or is damaged"):
        ledger_of(book, data, None).standing()
    assert in_room(tmp_path / "held", learning("import sys; sys.exit(3)"), settings).error
    book = QueryBudget(next((tmp_path / "held").rglob("_hospital")) / "a")
    held = ledger_of(book, data, None).standing().entries[-1]
    assert held.what == "a script's answer that was held back" and sum(held.bits.values()) == 69


@pytest.mark.slow
@needs_room
def test_scores_leave_in_steps_of_the_data_sets_patients(tmp_path: Path) -> None:
    """The rounding step follows from the hospital's 10 validation patients, even if the script claims a million
    cases.
    """
    folder, own = table(tmp_path / "data"), tmp_path / "set"
    made(folder, own, "--target", "outcome")
    assert main(["data", "accept", str(own), "--by", "A. Person"]) == 0
    lines = LEARNS.replace(
        "join(model, optimizer, batches",
        'join(model, optimizer, batches, samples={"train": 10**6, "validation": 10**6}',
    ).replace('"accuracy": accuracy', '"accuracy": 0.123456')
    settings = {"public_data": False, "approval": "none", "data": str(own)}
    ran = in_room(tmp_path / "study", lines, settings, rounds=1)
    assert not ran.error, ran.error + ran.printed
    (line,) = read_rounds(ran.record.folder)
    assert line.sites["a"].validation == 0.2
    (left,) = (one for one in ran.left if one["task"] == "round")
    assert left["bits"]["metrics"] < 21


def test_a_machine_without_bubblewrap_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ability.cache_clear()
    try:
        (found,) = check_airlock(SiteSettings(airlock="required"))
        assert found.severity == "stops" and "apt install bubblewrap" in found.what
        assert [one.severity for one in check_airlock(SiteSettings(airlock="wanted"))] == ["note"]
        (tmp_path / "medsilo.yaml").write_text("airlock: required\n")
        refused = launcher_of_code(tmp_path)
        assert isinstance(refused, RefusingLauncher) and "apt install bubblewrap" in refused.reason
    finally:
        ability.cache_clear()


def test_the_airlock_is_off_where_nobody_says_so(tmp_path: Path) -> None:
    (tmp_path / "medsilo.yaml").write_text("airlock: off\n")
    assert SiteSettings.read(tmp_path).airlock == SiteSettings().airlock == "off"


def test_nothing_of_a_jobs_code_and_classes_stays_in_the_sites_own_process(tmp_path: Path) -> None:
    """The site's process, which runs outside of the sandbox, reads a job's plan and weights, but imports no code of the
    job.
    """
    config = tmp_path / "app" / "config"
    write_text(config / "plan.yaml", make_plan("fedavg").to_yaml())
    write_text(config / "initial.safetensors", "")
    write_text(config / "log_config.json", '{"handlers": {"x": {"()": "os.system"}}}')
    write_text(config / "config_fed_client.yml", "executors: []")
    write_text(tmp_path / "app/custom/client.py", "")
    args = {"execution_mode": "in_process", "task_script_path": "client.py", "task_script_args": "--data {$HOME}"}
    executor = {"path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor", "args": args}
    told = {"executors": [{"tasks": ["*"], "executor": executor}], "components": [{"id": "x", "path": "mine.Mine"}]}
    write_json(config / "config_fed_client.json", told)
    take_code_away(config)
    take_code_away(config)
    assert {path.name for path in config.iterdir()} == {"plan.yaml", "initial.safetensors", "config_fed_client.json"}
    assert {path.name for path in config.parent.iterdir()} == {"config", "job"}
    written = (config / "config_fed_client.json").read_text()
    assert "AirlockExecutor" in written and "mine" not in written and "$HOME" not in written
    # the original files remain, so that the person who approved the job can read the files
    before = as_brought(config.parent)
    assert json.loads((before / "config/config_fed_client.json").read_text()) == told
    assert (before / "config/log_config.json").is_file() and (before / "custom/client.py").is_file()
    assert start_of(before / "config").arguments == ("--data", "{$HOME}")


@pytest.mark.skipif(not inside.landlock(), reason="no Landlock in this kernel")
def test_landlock_is_a_wall_by_itself(tmp_path: Path) -> None:
    """On a machine without bubblewrap, only Landlock isolates a process."""
    (tmp_path / "work").mkdir()
    tries = """
import os, signal, sys
for what, does in {
    "elsewhere": lambda: open(sys.argv[1] + "/x", "w"),
    "a link": lambda: os.symlink("/etc/passwd", sys.argv[1] + "/link"),
    "a device": lambda: os.mknod(sys.argv[1] + "/work/device", 0o20666, os.makedev(1, 3)),
    "the parent": lambda: os.kill(os.getppid(), 0),
}.items():
    try:
        print("GOT", what, does())
    except OSError as error:
        print("held", what, error.strerror)
print(open(sys.argv[1] + "/work/own", "w").write("x"), len(os.listdir("/etc")) > 0)
"""
    limits = ",".join(["4096", *[str(1 << 34)] * 2, "0", "1024"])
    start = [sys.executable, "-I", "-S", inside.__file__, limits, str(tmp_path / "work")]
    command = [*start, sys.executable, "-I", "-S", "-c", tries, str(tmp_path)]
    said = subprocess.run(["setpriv", "--no-new-privs", *command], capture_output=True, text=True)
    assert said.stdout.count("held") == (4 if inside.landlock() >= 6 else 3), said.stdout + said.stderr
    assert said.stdout.endswith("1 True\n") and "GOT" not in said.stdout


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_kernels_filter_denies_what_it_lists_and_nothing_else(machine: str) -> None:
    program, column = filter_program(machine), ["x86_64", "aarch64"].index(machine)
    assert program
    lines = [struct.unpack("<HBBI", program[place : place + 8]) for place in range(0, len(program), 8)]
    denied = {own[column] for own in seccomp.NUMBERS.values()}

    def allows(number: int, *given: int, architecture: int = seccomp.ARCHITECTURES[machine]) -> bool:
        told = {0: number, 4: architecture, **{16 + 8 * place: value for place, value in enumerate(given)}}
        place, held = 0, 0
        while True:
            does, true, false, value = lines[place]
            if does == seccomp.RETURN:
                return value == seccomp.ALLOW
            if does == seccomp.LOAD:
                held = told[value]
            else:
                fits = held == value if does == seccomp.EQUAL else held >= value
                place += true if fits else false
            place += 1

    socket, pair, files, options = (call.numbers[column] for call in seccomp.LIMITED.values())
    assert {number for number in range(600) if not allows(number, 1, 1, 1)} == denied
    assert {family for family in range(60) if allows(socket, family)} == set(seccomp.FAMILIES)
    assert [family for family in range(60) if allows(pair, family)] == [1]
    assert [command for command in range(2000) if not allows(files, 0, command)] == [1024]
    assert [option for option in range(100) if not allows(options, 0, 1, option)] == [7, 8]
    # system calls have different numbers on different processor architectures
    assert not allows(0, architecture=0x40000003)


# --------------------------------------------------------------------------------------- studies without a script
PHOTOS = {
    "algorithm": {"name": "fedbn"},
    "task": {"name": "image-folder", "kind": "classification", "labels": ["low", "high"], "size": [16, 16]},
    "network": {"name": "small-cnn", "width": 2},
    "training": {"rounds": 2, "batch_size": 4, "momentum": 0.9},
    "participation": {"sites": ["a"]},
}


def studied(
    folder: Path, photos: Path, room: bool, ends: int = 0, program: tuple[str, ...] = (), **settings: Any
) -> tuple[Record, SiteContext, str]:
    given = {"device": "cpu", "memory_limit": 2048, "approval": "none", "data": {"folder": str(photos)}}
    own = {"airlock": "required", "room": {"studies": True, "scratch": 64}} if room else {}
    plan = parse_plan(PHOTOS)
    site = paths.site_folder(folder / "study", "a")
    place = SiteContext(plan, "a", ["a"], SiteSettings.from_values({**given, **own, **settings}, "settings"), site)
    make = room_of(place)
    assert bool(make) == room
    there = make() if make else training_site(place)
    if program and isinstance(there, StudyRoom):
        there.program = program
    record, error = Record(folder / "run" / "study"), ""

    def after(line: Round) -> None:
        if line.round == ends and isinstance(there, StudyRoom):
            there.close(0)

    try:
        Coordinator(plan, ["a"], Line({"a": there}), record, "in-process", after).run()
    except MedsiloError as failed:
        error = str(failed)
    finally:
        if isinstance(there, StudyRoom):
            there.close()
    return record, place, error


@pytest.mark.slow
@needs_room
def test_a_study_of_medsilos_own_ends_in_a_room_with_the_same_bits(tmp_path: Path) -> None:
    """A study without a script gives the same bits in a sandbox as outside, even if the sandbox is restarted.

    Rounded scores, the query budget and the split of patients are the same with and without a sandbox.
    """
    photos = write_photos(tmp_path / "photos", NAMES)
    ends = []
    for name, ended in (("outside", 0), ("inside", 1)):
        write_text(tmp_path / "books" / name / "a" / "key", KEY)
        state = str(tmp_path / "books" / name)
        ends.append(studied(tmp_path / name, photos, name == "inside", ended, state_dir=state))
    (_, outside, failed), (_, inside, wrong) = ends
    assert not failed and not wrong, failed + wrong + (inside.folder / PRINTED).read_text()
    (before, _), (after, _) = (load_tensors(place.folder / paths.LAST) for place in (outside, inside))
    assert before.keys() == after.keys() and all(torch.equal(own, after[name]) for name, own in before.items())
    told = [read_rounds(record.folder)[-1].sites["a"].model_dump(exclude={*VARYING}) for record, *_ in ends]
    assert told[0] == told[1] and told[0]["validation"] is not None
    books = [QueryBudget(tmp_path / "books" / name / "a") for name in ("outside", "inside")]
    assert [[own.answered for own in book.counts().values()] for book in books] == [
        [Counter(train=2, validation=3, test=1)]
    ] * 2
    for name in ("parts.jsonl", "patients.jsonl", "told.jsonl"):
        assert (books[0].folder / name).read_text() == (books[1].folder / name).read_text()
    there = {path.name for path in inside.folder.iterdir()}
    assert {paths.METRICS, paths.CASES, paths.DATA, paths.WEIGHT, LEFT, PRINTED} <= there


TAKEN_OVER = """
import os, socket, sys
import SimpleITK
honest = SimpleITK.GetArrayFromImage

def tries(what, does):
    try:
        print("GOT", what, does(), flush=True)
    except BaseException as error:
        print("held", what, type(error).__name__, flush=True)

def taken_over(*given, **more):
    tries("a server", lambda: socket.create_connection(("127.0.0.1", {port}), 2))
    tries("another folder", lambda: os.listdir({other!r}))
    tries("the hospital's key", lambda: open({key!r}).read())
    tries("the images", lambda: open({photos!r} + "/x", "w"))
    tries("its own package", lambda: open(os.path.dirname(SimpleITK.__file__) + "/x", "w"))
    return honest(*given, **more)

SimpleITK.GetArrayFromImage = taken_over
from medsilo.airlock.study_inside import main
{lies}
main()
"""


@pytest.mark.slow
@needs_room
def test_a_reader_of_images_that_was_taken_over_meets_the_walls(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", NAMES)
    other = write_photos(tmp_path / "other", NAMES[:1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = {"port": server.getsockname()[1], "other": str(other), "photos": str(photos), "lies": ""}
        key = str(tmp_path / "book" / "a" / "key")
        code = TAKEN_OVER.format(**known, key=key)
        _, place, error = studied(
            tmp_path / "study",
            photos,
            True,
            program=(sys.executable, "-P", "-c", code),
            state_dir=str(tmp_path / "book"),
        )
    printed = (place.folder / PRINTED).read_text()
    assert not error and printed.count("held") >= 5 and "GOT" not in printed, error + printed


LIES = {
    "another tensor": ('groups["model"]["x"] = torch.ones(2)', "its tensors are not those"),
    "words": ('head["facts"]["suppressed"] = ["Miller"]', "its numbers are not those"),
    "more cases": ('head["facts"]["samples"] = 10**6', "its numbers are not those"),
    "a file elsewhere": ('honest(end, "keep", name="../../x", size=0)', "it is no message of medsilo"),
    "a file of this side": (f'honest(end, "keep", name="{LEFT}", size=0)', "it is no message of medsilo"),
    "the key's other uses": ('honest(end, "book", facts={"does": "number", "purpose": "script"})', "no message"),
    "words as a reason": (
        'honest(end, "failed", facts={"text": "Miller", "passes": False, "died": False})',
        "room failed",
    ),
}


@needs_room
@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_what_a_studys_room_says_is_checked_outside(lie: str, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", NAMES)
    does, reason = LIES[lie]
    lies = (
        "import torch\nfrom medsilo.airlock.wire import End\nhonest = End.send\n"
        "def lying(end, kind, groups=None, **head):\n"
        f"    if kind == 'answer' and head['facts']['task'] == 'round':\n        {does}\n"
        "    honest(end, kind, groups, **head)\nEnd.send = lying\n"
    )
    code = f"from medsilo.airlock.study_inside import main\n{lies}main()"
    _, place, error = studied(tmp_path / "study", photos, True, program=(sys.executable, "-P", "-c", code))
    assert reason in error and "Miller" not in error, error + (place.folder / PRINTED).read_text()


@needs_room
@pytest.mark.slow
def test_a_studys_room_moves_no_patient_whose_part_was_drawn(tmp_path: Path) -> None:
    """A compromised program in the sandbox cannot move patients between training and test data, because the hospital
    stores the split outside of the sandbox.
    """
    photos, state = write_photos(tmp_path / "photos", NAMES), str(tmp_path / "books")
    _, _, failed = studied(tmp_path / "honest", photos, True, state_dir=state)
    drawn = (tmp_path / "books/a" / PLACES).read_bytes()
    lies = (
        "from medsilo.airlock.study_inside import RoomBook, main\n"
        "honest, parts = RoomBook.places, ['train', 'validation', 'test', 'train']\n"
        "def lying(book, data, split, writes):\n"
        "    def moved(patients, draw, for_good):\n"
        "        found = honest(book, data, split, writes)(patients, draw, for_good)\n"
        "        other = {name: parts[parts.index(part) + 1] for name, part in found.items()}\n"
        "        print('moved', book._ask('place', places=other, for_good=True) == found, flush=True)\n"
        "        return found\n"
        "    return moved\n"
        "RoomBook.places = lying\nmain()"
    )
    program = (sys.executable, "-P", "-c", lies)
    _, place, error = studied(tmp_path / "lying", photos, True, program=program, state_dir=state)
    assert not failed and not error and "moved True" in (place.folder / PRINTED).read_text()
    assert (tmp_path / "books/a" / PLACES).read_bytes() == drawn


@pytest.mark.parametrize(
    ("known", "place"), [(".", "client.py"), ("elsewhere", "client.py"), ("", "elsewhere/client.py")]
)
def test_a_recipe_with_a_whole_path_starts_the_script_in_a_room(
    known: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare starts a recipe's script by the script's path below a folder of sys.path, or by the script's file
    name.
    """
    if known != ".":
        monkeypatch.syspath_prepend(tmp_path / known)
    write_text(tmp_path / "elsewhere" / "client.py", LEARNS)
    model, script = torch.nn.Linear(2, 2), str(tmp_path / "elsewhere" / "client.py")
    recipe = FedAvgRecipe(name="whole", model=model, min_clients=1, num_rounds=1, train_script=script, airlock=True)
    recipe.export(str(tmp_path / "job"))
    (config,) = {path.parent for path in (tmp_path / "job").rglob("script.json")}
    assert start_of(config).file == place and (config.parent / "custom" / place).is_file()
