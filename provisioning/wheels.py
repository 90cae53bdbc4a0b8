"""The wheels of a checkout: `medsilo`, all that a hospital needs, and `medsilo-lab`, what researchers and leads add.

    python provisioning/wheels.py SOURCE DIST     # make wheel

A checkout is installed as one, by `pip install -e .`: pyproject.toml has the entry points of both. Here they are
parted, by the package that an entry point names.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LAB = ("medsilo_lab", "medsilo_page")  # the packages of medsilo-lab
ABOUT = "What researchers and leads use of medsilo: comparison, pages, init, Python, prediction, kits"
FILES = ("README.md", "LICENSE")


def build(source: Path, dist: Path) -> None:
    """Build both wheels. What makes their bytes, the times and rights of files, are those of the source."""
    project = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))
    version = re.search(r'__version__ = "(.+)"', (source / "custom/medsilo/__init__.py").read_text("utf-8"))
    if not version:
        sys.exit("custom/medsilo/__init__.py has no version; nothing is built")
    for lab in (False, True):
        with TemporaryDirectory() as folder:
            place = Path(folder)
            for name in FILES:
                if (source / name).exists():
                    shutil.copy2(source / name, place / name)
            for package in (source / "custom").iterdir():
                if (package / "__init__.py").is_file() and (package.name in LAB) == lab:
                    shutil.copytree(
                        package, place / "custom" / package.name, ignore=shutil.ignore_patterns("__pycache__")
                    )
            described = "\n".join(written(parted(project, lab, version[1])))
            (place / "pyproject.toml").write_text(described + "\n", "utf-8")
            command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", dist.absolute(), place]
            subprocess.run([sys.executable, "-m", "pip", *map(str, command)], check=True)


def parted(project: Mapping[str, Any], lab: bool, version: str) -> dict[str, Any]:
    """Return what pyproject.toml says of one of the two."""
    own, tools = dict(project["project"]), dict(project["tool"]["setuptools"])
    points = {
        group: {name: where for name, where in entries.items() if where.startswith(LAB) == lab}
        for group, entries in own["entry-points"].items()
    }
    own["entry-points"] = {group: entries for group, entries in points.items() if entries}
    tools["package-data"] = {name: data for name, data in tools["package-data"].items() if (name in LAB) == lab}
    if lab:
        own = {name: own[name] for name in ("readme", "license", "requires-python", "entry-points")}
        own |= {
            "name": "medsilo-lab",
            "description": ABOUT,
            "version": version,
            "dependencies": [f"medsilo=={version}"],
        }
        tools.pop("dynamic")
    return {"build-system": project["build-system"], "project": own, "tool": {"setuptools": tools}}


def written(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the lines of a table in TOML."""
    plain = {name: value for name, value in table.items() if not isinstance(value, dict)}
    if above and plain:
        yield f"[{above}]"
    yield from (f"{json.dumps(name)} = {json.dumps(value)}" for name, value in plain.items())
    for name, value in table.items():
        if isinstance(value, dict):
            yield from written(value, f"{above}.{json.dumps(name)}".lstrip("."))


if __name__ == "__main__":
    sys.exit(build(*map(Path, sys.argv[1:])) if len(sys.argv) == 3 else __doc__)
