"""The rooms of the package: what is in each. Who may use whom pyproject.toml says, and `lint-imports` holds it.

`python -m tests.rooms` writes the table into CONTRIBUTING.md; tests/unit/test_houserules.py holds it to the tree.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: written by 'python -m tests.rooms' -->", "<!-- end of rooms -->"

ROOMS = {
    "core": "errors, sections of a plan, atomic files, storage on disk, version and hash",
    "learning": "a site's mathematics in plain PyTorch: training loop, layers, optimizers, statistics",
    "mixing": "the server's mathematics in plain PyTorch: aggregators and server steps",
    "privacy": "differential privacy: mechanisms, accounting, secure noise",
    "models": "the networks",
    "tasks": "data, loss and metric of one medical question; image files, splits, partitions",
    "schedule": "a study as data: phases of groups, what a method sees at a site and at the server, outcomes",
    "registry": "names of methods, tasks and networks, our own and those of other packages",
    "plan": "the one description of a study: checked, resolved, hashed",
    "site": "a hospital's settings, policy, query budget, approvals and privacy ledger",
    "runs": "the typed record of a run: its files, their names, the messages between server and sites",
    "deploy": "the super model and its folder",
    "methods": "one file per method",
    "federation": "the server's part and a site's part, without NVFlare; both in one process",
    "flare": "what runs inside NVFlare: controller, executor, filters, transport, jobs, simulator",
    "check": "a site's check before it joins, and the disclosure report",
    "script": "the user's training script: its network and metric in a plan, and the site that trains it",
    "client": "what a training script imports: `join`, around NVFlare's Client API",
    "recipes": "recipes for NVFlare: a job in which a training script learns by a method",
    "cli": "the command line",
    "extend": "the interface that plug-ins import",
}

# Generic to NVFlare: it imports nothing of ours, and those that know NVFlare use it.
BENEATH = {
    "nvflare_reliability": "reliability that NVFlare lacks: patches with their issues, message limits, chunks, liveness"
}
# Packages beside the engine, which no room knows.
PLUGINS = {
    "medsilo_adapters": "networks that train only a part: checkpoints and adapters",
    "medsilo_dicom": "DICOM: series into volumes, segmentations and contours into masks, and results back",
    "medsilo_lab": "for researchers, leads and newcomers: comparison, pages, `init`, Python API, kits, prediction",
    "medsilo_page": "`medsilo approve --page`: a hospital's own web page, on its own machine",
    "medsilo_nnunet": "nnU-Net: its task and network, and its plans for data of several hospitals",
    "medsilo_papers": "the papers' data sets and networks, and membership inference tests",
    "medsilo_secagg": "secure aggregation: the server adds up numbers that it cannot read",
    "medsilo_series": "a hospital's time series: task, dataset probe, prediction",
    "medsilo_zoo": "methods beyond those that the three papers compare with",
}

# Folders of a room that know nothing of each other: they use the room's root, which does not use them.
WINGS = {
    "tasks": {
        "own": "a hospital's images and tables",
        "synthetic": "synthetic hospitals, for trying out and for tests",
    }
}


def layers() -> list[list[str]]:
    """Return the engine's rooms from bottom to top; those of one layer know nothing of each other."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    [own] = [rule["layers"] for rule in rules if rule["id"] == "rooms"]
    return [layer.split(" | ") for layer in reversed(own)]


def table() -> str:
    """Return the rooms as a Markdown table."""
    rows = ["| layer | package | contents |", "|---|---|---|"]
    for number, rooms in enumerate(layers(), 1):
        for name in rooms:
            rows.append(f"| {number} | `{name}` | {ROOMS[name]} |")
            rows += [f"| {number} | `{name}/{wing}` | {holds} |" for wing, holds in WINGS.get(name, {}).items()]
    others = {"extend": ROOMS["extend"], **BENEATH, **PLUGINS}
    rows += [f"|  | `{name}` | {holds} |" for name, holds in others.items()]
    return "\n".join(rows)


def document() -> str:
    """Return CONTRIBUTING.md as it should be."""
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), "utf-8")
