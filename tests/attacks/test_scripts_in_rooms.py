"""Hostile training scripts in an isolated process fail to reach their goals.

Each script prints GOT if its attempt succeeds; the script's output stays at the hospital.
"""

import socket
from pathlib import Path

import pytest

from medsilo.airlock.border import HELD
from medsilo.airlock.room import ability
from tests.attacks.rooms import BEGINS, SENDS, in_room

pytestmark = pytest.mark.skipif(not ability().works, reason="no bubblewrap, or no user namespaces")

TRIES = """
def tries(what, does):
    try:
        print("GOT", what, does())
    except BaseException as error:
        print("held", what, type(error).__name__)
"""

WALLS = {
    "to connect by TCP, UDP, DNS": """
import socket
tries("tcp", lambda: socket.create_connection(("192.0.2.1", 443), 2))
tries("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)))
tries("dns", lambda: socket.getaddrinfo("example.org", 443))
tries("a server of this machine", lambda: socket.create_connection(("127.0.0.1", {port}), 2))
tries("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
tries("packet", lambda: socket.socket(17, socket.SOCK_RAW))
""",
    "to read the hospital's files, and other processes": """
import os, glob
tries("the kit", lambda: open("{kit}").read())
tries("the kit's folder", lambda: os.listdir(os.path.dirname("{kit}")))
tries("passwords", lambda: open("/etc/shadow").read())
tries("another process", lambda: [own for own in glob.glob("/proc/[0-9]*/cmdline") if "pytest" in open(own).read()][0])
tries("what the room is made of", lambda: open("/proc/1/root/etc/shadow").read())
tries("a variable of the site's", lambda: open("/proc/1/environ").read()[0])
tries("a variable", lambda: os.environ["SECRET_OF_THE_SITE"])
""",
    "to leave something behind": """
import os, sys
tries("a file in its own folder", lambda: open(os.path.dirname(__file__) + "/x", "w"))
tries("a file among the packages", lambda: open(os.path.dirname(os.__file__) + "/sitecustomize.py", "w"))
tries("a file in the root", lambda: open("/x", "w"))
tries("a full scratch", lambda: open("/tmp/x", "wb").write(bytes(1 << 27)))
tries("a full shared memory", lambda: open("/dev/shm/x", "wb").write(bytes(1 << 27)))
""",
}


@pytest.mark.parametrize("wants", WALLS)
def test_a_room_has_walls(wants: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SITE", "x")
    kit = tmp_path / "kit" / "client.key"
    kit.parent.mkdir()
    kit.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines = WALLS[wants].format(kit=kit, port=server.getsockname()[1])
        ran = in_room(tmp_path / "study", TRIES + lines)
    assert "held" in ran.printed and "GOT" not in ran.printed, ran.printed
    assert "ended before its answer" in ran.error and "secret" not in ran.error


# Each script writes directly to the socket that leaves the sandbox, without medsilo's protocol code. In each script,
# `end` is the socket and `head` is an honest answer that the script changes.
SPEAKS = """
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.client.api_spec import CLIENT_API_KEY

api = DataBus().get_data(CLIENT_API_KEY)
honest = api.end.send

def send(kind, groups=None, **head):
    if kind == "answer" and head["facts"]["task"] == "round":
        lies(groups, head)
    honest(kind, groups, **head)

api.end.send = send
"""
BORDER = {
    "one tensor more": ('groups["model"]["secret"] = torch.ones(3)', "tensors are not those"),
    "one tensor less": ('groups["model"].popitem()', "tensors are not those"),
    "another group": ('groups["other"] = groups["model"]', "tensors are not those"),
    "another shape": ('groups["model"]["0.bias"] = torch.ones(9)', "tensors are not those"),
    "another type": ('groups["model"]["0.bias"] = torch.ones(8).double()', "tensors are not those"),
    "NaN": ('groups["model"]["0.bias"][0] = torch.nan', "what no training gives"),
    "a variance below zero": ('groups["model"]["1.running_var"][0] = -1', "what no training gives"),
    "a far update": ('groups["model"]["0.bias"][0] = 1e6', "larger than border.norm, 50"),
    # the hospital's process, and not the script, determines the study's name in a message
    "another study": ('head["facts"]["study"] = "other"', ""),
    "words in a name": ('head["facts"]["name of a patient"] = 1', "its numbers are not those of this task"),
    "words in a score": ('head["facts"]["validation"] = "Miller"', "its numbers are not those of this task"),
    # the hospital's process, and not the script, determines the number of cases in a message
    "more cases than it joined with": ('head["facts"]["samples"] = 10**6', ""),
    "a request of its own": ('honest("ask")', "it is no message of medsilo"),
    "a file of the hospital's": ('honest("keep", name="../../x", size=0)', "it is no message of medsilo"),
    "a name of the hospital's files": ('honest("keep", name="plan.yaml", size=0)', "it is no message of medsilo"),
    "another kind": ('honest("Miller")', "it is no message of medsilo"),
    "no JSON": ('api.end.write(memoryview(b"\\0\\0\\0\\4[[[["))', "it is no message of medsilo"),
    "a long head": ('api.end.write(memoryview(b"\\xff\\xff\\xff\\xff"))', "it is no message of medsilo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wants", BORDER)
def test_a_border_holds_back(wants: str, tmp_path: Path) -> None:
    """A hospital discards values that the plan does not describe, and gives a reason that contains no word of the
    script.
    """
    lie, held = BORDER[wants]
    lines = BEGINS.replace("while flare", f"{SPEAKS}\ndef lies(groups, head):\n    {lie}\nwhile flare") + SENDS
    ran = in_room(tmp_path, lines, {"border": {"norm": 50}})
    assert ran.printed == ""
    assert (held in ran.error and HELD in ran.error) if held else not ran.error, ran.error
    assert "Miller" not in ran.error and "patient" not in ran.error
