"""List medsilo's packages and the subpackages of `medsilo`, with a description of each. The contracts in pyproject.toml
limit the imports between packages.

`python -m tests.rooms` writes the picture of the imports and the tables into CONTRIBUTING.md. The tests in
tests/unit/cli/test_houserules.py compare the picture and the tables with the source tree.
"""

import tomllib
from functools import cache
from pathlib import Path

from tests.sources import imported_by, modules

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
    "exchange": "what a server and a site keep to when they write to each other: channel, bounds, checks",
    "federation": "a site's part, without NVFlare: it trains, validates and answers",
    "flare": "what runs inside NVFlare at a site: executor, filters, the form of messages; jobs as they are read",
    "airlock": "a room without network for a lead's training script, and the checks at its one exit",
    "check": "a site's check before it joins, and the disclosure report",
    "cli": "the command line, and a hospital's commands",
    "extend": "the interface that plug-ins import",
}

# Packages that serve any NVFlare application and import no module of medsilo; medsilo's NVFlare packages import these
# packages.
BENEATH = {
    "nvflare_reliability": "reliability that NVFlare lacks: patches with their issues, message limits, chunks, liveness"
}
PLUGINS = {
    "medsilo_server": "the consortium's server: coordinator, acceptance, record; in NVFlare controller and transport",
    "medsilo_script": "a training script of one's own: `join`, and the site that trains it",
    "medsilo_pretrained": "further networks: of papers, transformers, and from a checkpoint, trained whole or in part",
    "medsilo_dicom": "DICOM: series into volumes, segmentations and contours into masks",
    "medsilo_lab": "for researchers, leads and newcomers: engines, comparison, reports, `init`, Python API, kits",
    "medsilo_page": "`medsilo page`: a hospital's own web page, on its own machine",
    "medsilo_nnunet": "nnU-Net: its task and network, and its plans for data of several hospitals",
    "medsilo_papers": "the papers' data sets",
    "medsilo_secagg": "secure aggregation: the server adds up numbers that it cannot read",
    "medsilo_series": "a hospital's time series, as windows of recordings",
    "medsilo_zoo": "methods beyond those that the three papers compare with",
}
WHOSE = {  # owner of each package; a plug-in belongs to everybody whose plans name the plug-in
    "medsilo": "hospital, and all others",
    "medsilo_server": "server",
    "medsilo_script": "user of NVFlare",
    "medsilo_lab": "lead, researcher",
    "medsilo_page": "hospital",
    "medsilo_papers": "researcher",
    "medsilo_secagg": "hospital, server",
    "nvflare_reliability": "everybody over NVFlare",
}

# Independent folders of a subpackage, which import the subpackage's root but are not imported by the root.
WINGS = {
    "tasks": {
        "own": "a hospital's images and tables",
        "synthetic": "synthetic hospitals, for trying out and for tests",
    }
}


def layers() -> list[list[str]]:
    """Return the engine's subpackages from bottom to top; subpackages of one layer are independent."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    [own] = [rule["layers"] for rule in rules if rule["id"] == "rooms"]
    return [layer.split(" | ") for layer in reversed(own)]


@cache
def used_by() -> dict[str, set[str]]:
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in ("medsilo", *BENEATH, *PLUGINS)}
    for module in known.keys() - {"medsilo.client", "medsilo.recipes"}:
        own = module.partition(".")[0]
        found[own] |= {name.partition(".")[0] for name in imported_by(module, known)} - {own}
    return found


def picture() -> str:
    uses = used_by()
    lines = ["```mermaid", "graph TD"]
    for package in sorted(uses, key=lambda name: (-len(uses[name]), name)):
        through = {further for other in uses[package] for further in uses[other]}
        lines += [f"    {package} --> {other}" for other in sorted(uses[package] - through)]
    return "\n".join([*lines, "```"])


def packages() -> str:
    holds = {"medsilo": "what a hospital installs, approves and hashes: the rooms below", **PLUGINS, **BENEATH}
    rows = [f"| `{name}` | {WHOSE.get(name, 'plug-in')} | {holds[name]} |" for name in {**WHOSE, **holds}]
    return "\n".join(["| package | whose | contents |", "|---|---|---|", *rows])


def table() -> str:
    rows = ["| layer | room | contents |", "|---|---|---|"]
    for number, rooms in enumerate(layers(), 1):
        for name in rooms:
            rows.append(f"| {number} | `{name}` | {ROOMS[name]} |")
            rows += [f"| {number} | `{name}/{wing}` | {holds} |" for wing, holds in WINGS.get(name, {}).items()]
    rows.append(f"|  | `extend` | {ROOMS['extend']} |")
    return "\n".join(rows)


def document() -> str:
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    told = "\n\n".join(
        [picture(), packages(), f"Within `medsilo`, a room imports those of lower layers only:\n\n{table()}"]
    )
    return f"{before}{BEGIN}\n{told}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), "utf-8")
