"""The rooms of the package: what is in each, and which others it may use.

`python -m tests.rooms` writes the table into CONTRIBUTING.md; tests/unit/test_houserules.py holds imports to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: written by 'python -m tests.rooms' -->", "<!-- end of rooms -->"
LONG = 11  # rooms from which a row names those that are not used


@dataclass(frozen=True)
class Room:
    """A folder of the package, or a file of its root."""

    holds: str
    uses: frozenset[str]


def room(holds: str, uses: str = "") -> Room:
    """Return a room from the names of those that it uses, with spaces between them."""
    return Room(holds, frozenset(uses.split()))


ROOMS = {
    "core": room("errors, sections of a plan, files written whole, spilling to disk, version and hash"),
    "learning": room(
        "a site's mathematics in plain PyTorch: training loop, layers, optimizers, statistics", "core privacy"
    ),
    "mixing": room("the server's mathematics in plain PyTorch: mixers and server steps", "core"),
    "sealing": room("sealed mixing: masks that hospitals put on what they send and the server adds up", "core"),
    "privacy": room("differential privacy: what was released, what it costs together, noise nobody can guess", "core"),
    "models": room("the networks", "core"),
    "tasks": room(
        "data, loss and metric of one medical question; image files, splits, partitions", "core learning models"
    ),
    "course": room(
        "a study as data: phases of groups, what a method finds at a site and at the server, outcomes",
        "core learning mixing privacy tasks",
    ),
    "registry": room("names of methods, tasks and networks, our own and those of other packages", "core"),
    "plan": room(
        "the one description of a study: checked, resolved, hashed",
        "core course learning mixing models privacy registry tasks",
    ),
    "site": room(
        "a hospital's own settings, policy, memory, approvals and privacy ledger", "core learning privacy sealing tasks"
    ),
    "runs": room(
        "the typed record of a run: what is in its files, their names, the messages between server and sites",
        "core plan privacy",
    ),
    "deploy": room(
        "the super model and its folder",
        "core course learning models plan registry runs tasks",
    ),
    "methods": room("one file per method", "core course deploy learning mixing models privacy tasks"),
    "federation": room(
        "the coordinator (server's side) and the participant (site's side), without NVFlare; both in one process",
        "core course learning mixing plan privacy registry runs sealing site tasks",
    ),
    "flare": room(
        "what runs inside NVFlare: controller, executor, filters, transport, jobs, simulator",
        "core federation learning plan registry runs site tasks",
    ),
    "check": room(
        "a site's check before it joins, and the leak report",
        "core course federation learning plan privacy runs site tasks",
    ),
    "script": room(
        "a training script of the user's own: its network and metric in a plan, and a site that it trains",
        "core course federation learning models plan runs tasks",
    ),
    "client": room(
        "what a training script imports: `join`, around NVFlare's Client API",
        "core deploy flare learning plan runs script",
    ),
    "recipes": room(
        "recipes for NVFlare: a job in which a training script learns by a method", "core flare plan runs script"
    ),
}
BENEATH = {"learning", "mixing", "models", "sealing"}  # mathematics, which others put to use
ROOMS["cli"] = Room("the command line", frozenset(ROOMS) - BENEATH)
ROOMS["extend"] = Room("what plug-ins import; nothing else uses it", frozenset(ROOMS))

# Generic to NVFlare: it imports nothing of ours, and those that know NVFlare use it.
RELIABILITY = "nvflare_reliability"
RELIABLE = room(
    "NVFlare where lines break and senders misbehave: patches with their issues, message limits, chunks, liveness"
)

# Packages beside the engine, which no room knows. Plug-ins use `extend`; medsilo's own commands and methods use rooms.
PLUGINS = {
    "medsilo_adapters": room(
        "networks that train only a part: checkpoints and adapters",
        "extend",
    ),
    "medsilo_dicom": room(
        "DICOM: series into volumes, segmentations and contours into masks, and results back", "extend"
    ),
    "medsilo_lab": Room(
        "what researchers, leads and newcomers use: comparison, pages, `init`, the Python API, kits, prediction",
        frozenset(ROOMS) - {"extend"},
    ),
    "medsilo_page": room(
        "`medsilo approve --page`: a hospital's own web page, on its own machine",
        "check core medsilo_lab plan runs site",
    ),
    "medsilo_nnunet": room(
        "nnU-Net: its task and network, and its plans for data that lie in several hospitals", "extend"
    ),
    "medsilo_papers": room(
        "the papers' data sets and networks, and the test of whether models tell who they learned from", "extend"
    ),
    "medsilo_series": room(
        "a hospital's own time series: the task, and what looks at, predicts and exports them", "extend"
    ),
    "medsilo_zoo": room("methods beyond those that the three papers compare with", "extend"),
}

# Folders of a room that know nothing of each other: they use the room's root, which does not use them.
WINGS = {
    "tasks": {
        "own": "a hospital's own images and tables",
        "synthetic": "hospitals that are drawn, for trying out and for tests",
    }
}


def table() -> str:
    """Return who may use whom as a Markdown table."""
    rows = ["| room | what is there | uses |", "|---|---|---|"]
    for name, own in ROOMS.items():
        rows.append(f"| `{name}` | {own.holds} | {_uses(own)} |")
        rows += [
            f"| `{name}/{wing}` | {holds} | `{name}` and what it uses |" for wing, holds in WINGS.get(name, {}).items()
        ]
    rows += [f"| `{name}` | {own.holds} | {_uses(own)} |" for name, own in {RELIABILITY: RELIABLE, **PLUGINS}.items()]
    return "\n".join(rows)


def _uses(own: Room) -> str:
    unused = ROOMS.keys() - own.uses - {"cli", "extend"}
    if len(own.uses) > LONG:
        return f"all but {_names(unused)}"
    return _names(own.uses) or "nothing"


def _names(rooms: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in ROOMS if name in rooms)


def document() -> str:
    """Return CONTRIBUTING.md as it should be."""
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), "utf-8")
