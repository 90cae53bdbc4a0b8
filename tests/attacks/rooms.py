"""Run a script in an isolated process as a hospital does, in a study of one or more hospitals but without NVFlare.

    result = in_room(tmp_path, "print(open('/etc/shadow').read())")
    result.printed   # what the script printed, which stays at the hospital
    result.reasons   # why the hospital's answer is missing, in the words that leave the hospital

A script that contains the text LEARNS takes part in training. `learning("...")` returns a script that runs the given
code in each round before sending the script's answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import torch
from torch import Tensor, nn

from medsilo.airlock.border import LEFT
from medsilo.airlock.room import Script
from medsilo.airlock.site import PRINTED, ScriptRoom
from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, write_text
from medsilo.federation.file_supply import SuppliedSite
from medsilo.federation.site_context import SiteContext
from medsilo.runs import paths
from medsilo.runs.rounds import Round
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines.inprocess import Line
from medsilo_lab.script_plan import plan_of_script
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record

BEGINS = """
import torch
from torch import nn
import medsilo.client as flare

flare.init()
torch.manual_seed(0)
inputs = torch.randn(40, 4)
batches = [(inputs[n : n + 10], (inputs[n : n + 10].sum(1) > 0).long()) for n in range(0, 40, 10)]
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
flare.join(model, optimizer, batches)
while flare.is_running():
    received = flare.receive()
    model.load_state_dict(received.params)
    accuracy = sum((model(x).argmax(1) == y).sum().item() for x, y in batches) / 40
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
SENDS = '    flare.send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": accuracy}))\n'
LEARNS = BEGINS + SENDS
ROOM = dict[str, Any](device="cpu", memory_limit=2048, public_data=True, room={"scratch": 64, "processes": 64})


def learning(does: str) -> str:
    return f"{BEGINS}{indent(dedent(does), '    ')}\n{SENDS}"


@dataclass(frozen=True)
class Ran:
    folder: Path
    record: Record
    error: str

    @property
    def printed(self) -> str:
        file = self.folder / PRINTED
        return file.read_text() if file.exists() else ""

    @property
    def left(self) -> list[dict[str, Any]]:
        file = self.folder / LEFT
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def model(self) -> dict[str, Tensor]:
        return load_tensors(self.folder / paths.LAST)[0]


def in_room(
    folder: Path,
    script: str,
    settings: Mapping[str, Any] | None = None,
    method: str = "fedavg",
    sites: Sequence[str] = ("a",),
    rounds: int = 2,
    files: Mapping[str, str] | None = None,
    ends: int = 0,
    command: tuple[str, ...] = ("python3", "-u"),
    **plan: Any,
) -> Ran:
    """Run a script at hospitals that have the settings ROOM, changed by `settings`.

    Args:
        files: Additional modules for the script's folder.
        ends: The round after which all processes of the script are killed.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    app = folder / "job" / "app"
    for name, text in {"client.py": script, **(files or {})}.items():
        write_text(app / "custom" / name, text)
    made = plan_of_script(
        model, app / "config", {"name": method}, rounds=rounds, minimum=len(sites), sites=sites, further=plan or None
    )
    write_text(app / "config" / paths.PLAN, made.to_yaml())
    model_folders.look_in(app / "config")
    own = SiteSettings.from_values({**ROOM, **(settings or {})}, "settings")
    started = Script(app / "custom", "client.py", command=command)
    places = {
        site: SiteContext(made, site, list(sites), own, paths.site_folder(folder / site / "study", site))
        for site in sites
    }
    rooms = {site: ScriptRoom(place, started, "job") for site, place in places.items()}
    record, error = Record(folder / "runs" / "study"), ""
    channel = Line({site: SuppliedSite(room.context, partial(_same, room)) for site, room in rooms.items()})

    def after(line: Round) -> None:
        for room in rooms.values() if line.round == ends else ():
            room.close(0)

    try:
        Coordinator(made, list(sites), channel, record, "in-process", after).run()
    except MedsiloError as failed:
        error = str(failed)
    finally:
        for room in rooms.values():
            room.close()
    return Ran(rooms[sites[0]].context.folder, record, error)


def _same(room: ScriptRoom) -> ScriptRoom:
    return room
