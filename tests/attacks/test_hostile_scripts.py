"""Run each hostile script in an isolated process at a hospital; the hospital stops the script, or counts the bits that
the script sends.

A script prints GOT if its attempt succeeded; the script's output stays at the hospital.
"""

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from medsilo.airlock.group import limits_memory
from medsilo.airlock.room import ability
from medsilo.airlock.site import PRINTED
from tests.attacks.hostile.lead import SECRET
from tests.attacks.hostile_scripts import CASES, HERE, PAGE, document, scripts
from tests.attacks.rooms import ROOM, Ran, in_room

KIT = ("startup/client.key", "startup/client.crt", "startup/start.sh", "local/medsilo.yaml", "local/authorization.json")
needs_rooms = pytest.mark.skipif(not ability().works, reason="no bubblewrap, or no user namespaces")


class Hospital:
    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder = folder
        for name in (*(f"kit/{name}" for name in KIT), "other/patients.csv"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(SECRET)
        path, abstract = str(folder / "site.sock"), f"hostile-{os.getpid()}"
        kinds = (socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX,) * 2
        tcp, udp, *unix = (
            opened.enter_context(socket.socket(family, kind if family != socket.AF_UNIX else socket.SOCK_STREAM))
            for family, kind in (*kinds, kinds[2])
        )
        self.listening = [tcp, udp, *unix]
        for end, address in zip(
            self.listening, (("127.0.0.1", 0), ("127.0.0.1", 0), path, f"\0{abstract}"), strict=True
        ):
            end.bind(address)
            end.setblocking(False)
            end.type == socket.SOCK_STREAM and end.listen()
        self.mark = folder / "mark"
        self.knows = {
            "KIT": str(folder / "kit"),
            "OTHER": str(folder / "other"),
            "FOLDER": str(folder),
            "STUDY": str(folder / "study" / "a"),
            "PORT": tcp.getsockname()[1],
            "UDP": udp.getsockname()[1],
            "SOCKET": path,
            "ABSTRACT": abstract,
            "PID": os.getpid(),
            "MARK": str(self.mark),
        }
        self.before = self.files()

    def files(self) -> dict[str, bytes]:
        found = (path for path in self.folder.rglob("*") if self.folder / "study" not in path.parents)
        return {str(path): path.read_bytes() for path in found if path.is_file()}

    def heard(self) -> bool:
        for end in self.listening:
            try:
                end.accept() if end.type == socket.SOCK_STREAM else end.recv(99)
            except BlockingIOError:
                continue
            return True
        return False

    def run(self, name: str) -> Ran:
        case, text = CASES[name], (HERE / f"{name}.py").read_text()
        known = "".join(f"{name} = {value!r}\n" for name, value in self.knows.items())
        settings = {"border": {"norm": 50}, "public_data": False, **case.settings}
        return in_room(
            self.folder / "study",
            text,
            {**settings, "room": {**ROOM["room"], **settings.get("room", {})}},
            sites=case.sites,
            rounds=case.rounds,
            files={"lead.py": (HERE / "lead.py").read_text(), "knows.py": known},
            command=tuple(case.command.split()),
        )


@pytest.fixture
def hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hospital]:
    monkeypatch.setenv("PASSWORD_OF_THE_SITE", "secret-of-the-site")
    with ExitStack() as opened:
        yield Hospital(tmp_path, opened)


@needs_rooms
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if case.slow else ()) for name, case in CASES.items()]
)
def test_a_hostile_script_is_stopped_or_counted(name: str, hospital: Hospital) -> None:
    if CASES[name].by_group and not limits_memory():
        pytest.skip("this account may make no control group")
    case, ran = CASES[name], hospital.run(name)
    printed = [file.read_text() for file in hospital.folder.rglob(PRINTED)]
    assert not [line for text in printed for line in text.splitlines() if line.startswith("GOT")]
    assert not hospital.mark.exists() and not hospital.heard() and hospital.files() == hospital.before
    assert sum(map(len, printed)) < 17 << 20
    assert "Miller" not in ran.error and "\n" not in ran.error
    study = [file for file in (hospital.folder / "study" / "runs").rglob("*") if file.is_file()]
    assert study and not [file for file in study if b"Miller" in file.read_bytes() and not LEAVES.get(name)]
    if case.reason:
        assert ((os.getuid() and case.as_user) or case.reason) in ran.error
        assert ran.left[-1]["bits"] == {"reasons": 5, "times": 64}
    else:
        assert not ran.error and [line["task"] for line in ran.left[1:-2]] == ["round"] * case.rounds
    if case.verdict == "walls" and name != "command_options":
        assert sum(text.count("held ") for text in printed) > 2
    if case.verdict == "counted":
        assert LEAVES[name](ran), "it doesn't leave: the table says too little for the room"


def counted(ran: Ran, kind: str, bits: int, task: str = "round") -> bool:
    return all(line["bits"].get(kind, 0) >= bits for line in ran.left if line["task"] == task)


def as_weights(ran: Ran) -> bool:
    bits = ran.model["0.weight"].view(torch.int32).flatten()[: len(SECRET)] & 255
    return bytes(bits.tolist()) == SECRET and counted(ran, "tensors", 8 * len(SECRET))


def as_batch_norm(ran: Ran) -> bool:
    means = ran.model["1.running_mean"].view(torch.int32)[:6].tolist()
    told = b"".join(struct.pack(">I", mean & 0x7FFFFF)[1:] for mean in means)
    batches = int(ran.model["1.num_batches_tracked"]).to_bytes(7, "big")
    return (
        told == bytes(b & 127 if n % 3 == 0 else b for n, b in enumerate(SECRET[:18]))
        and batches == SECRET[:7]
        and counted(ran, "tensors", 8 * 25)
    )


def rounds(ran: Ran) -> list[dict]:
    lines = (json.loads(line) for line in (ran.record.folder / "rounds.jsonl").read_text().splitlines())
    return list(lines)


def as_seconds(ran: Ran) -> bool:
    bits = "".join(str(int(line["sites"]["a"]["seconds"] > 5.0)) for line in rounds(ran))
    return bits == f"{SECRET[0]:08b}"[: len(bits)] and counted(ran, "times", 128)


def as_memory(ran: Ran) -> bool:
    return all(line["sites"]["a"]["memory"] > 1300 << 20 for line in rounds(ran)) and counted(ran, "times", 128)


def as_cases(ran: Ran) -> bool:
    # all disclosed counts are multiples of min_patients_per_metric
    told = {line["sites"]["a"]["samples"] for line in rounds(ran)}
    return (
        len(told) == 1 and 1234 - told.pop() < 20 and counted(ran, "counts", 11) and counted(ran, "counts", 60, "join")
    )


LEAVES = {
    "low_bits": as_weights,
    "batch_norm": as_batch_norm,
    "timing": as_seconds,
    "takes_memory": as_memory,
    "samples": as_cases,
}


def test_all_hostile_scripts_run_and_are_on_the_page() -> None:
    assert scripts() == set(CASES) and len(CASES) >= 40
    assert PAGE.read_text("utf-8") == document()
