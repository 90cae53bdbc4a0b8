"""Build the two wheels of a checkout: `medsilo` has all that a hospital needs, and `medsilo-lab` adds the code for
servers, leads and researchers.

    python provisioning/wheels.py SOURCE DIST     # make wheel

`pip install -e .` installs all code at once, because pyproject.toml lists the entry points of both wheels. Each wheel
contains only the entry points of packages in this wheel.
"""

import bz2
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w
import zopfli

from medsilo.cli.documentation import LAB_PAGES, PAGES, pages_of

LAB = ("medsilo_lab", "medsilo_papers", "medsilo_server")  # the packages in the wheel medsilo-lab
# The pages in the wheel medsilo-lab: pages for leads, researchers and developers, and pages about commands of
# medsilo-lab. All other pages are in the wheel medsilo.
OF_LAB = (
    *("after/*", "provisioning", "reference/benchmarks", "reference/data", "reference/commands/begin"),
    *("reference/commands/lead", "reference/commands/one-machine", "reference/commands/runs"),
    *("reference/keys/aggregation", "reference/keys/lines", "reference/keys/method", "reference/keys/network"),
    *("reference/keys/task", "reference/run-folder", "reference/run-folder/*"),
    *("research/compare", "research/extend", "research/methods", "research/methods/*"),
    *("start/data-set", "start/dicom", "trust/secure-aggregation", "trust/threat-model"),
    *("research/own-script", "research/python", "research/reproduce", "research/weights", "research/which-method"),
    *("start/taking-part", "start/tutorial", "study/consortium", "study/reading", "trust/reliability"),
)
ABOUT = "What servers, leads and researchers use of medsilo: the server, kits, comparison, reports, init, Python"
README = "README.md"
OF_BOTH = ("readme", "license", "license-files", "requires-python", "authors", "keywords", "classifiers", "urls")
_INWARD = re.compile(r"(!?\[[^]]*\])\((?![a-z]+:|#)([^)\s]+)\)")  # matches a Markdown link to a file in the repository


def build(source: Path, dist: Path) -> None:
    """Build both wheels. The bytes of the wheels depend only on the contents, times and permissions of the source
    files.
    """
    project = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))
    version = project["project"]["version"]
    for lab in (False, True):
        with TemporaryDirectory() as folder:
            place = Path(folder)
            shutil.copy2(source / "LICENSE", place / "LICENSE")
            text = (source / README).read_text("utf-8")
            (place / README).write_text(led_outward(text, project["project"]["urls"]["Repository"], version), "utf-8")
            for package in (source / "custom").iterdir():
                if (package / "__init__.py").is_file() and (package.name in LAB) == lab:
                    shutil.copytree(
                        package, place / "custom" / package.name, ignore=shutil.ignore_patterns("__pycache__")
                    )
            write_pages(source, place / "custom/medsilo", lab)
            if lab:  # the jobs that commands find by name, and the example policies that consortium.yaml names
                shutil.copytree(source / "jobs", place / "custom/medsilo/jobs")
                shutil.copytree(source / "site_configs", place / "custom/medsilo_lab/site_configs")
            (place / "pyproject.toml").write_text(tomli_w.dumps(parted(project, lab, version)), "utf-8")
            command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", dist.absolute(), place]
            subprocess.run([sys.executable, "-m", "pip", *map(str, command)], check=True)
            shrink(next(dist.glob(f"{'medsilo_lab' if lab else 'medsilo'}-{version}-*.whl")))


def shrink(wheel: Path) -> None:
    """Compress a wheel's files as well as zip can. setuptools compresses them faster, and less well."""
    with zipfile.ZipFile(wheel) as old:
        files = [(info, old.read(info)) for info in old.infolist()]
    with zopfli.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for info, content in files:
            new.writestr(info, content)


def write_pages(source: Path, folder: Path, lab: bool) -> None:
    """Write a file with the pages that `medsilo docs` shows if one of the wheels is installed."""
    pages = {page: text for page, text in pages_of(source).items() if is_of_lab(page) == lab}
    folder.mkdir(exist_ok=True)
    (folder / (LAB_PAGES if lab else PAGES).name).write_bytes(
        bz2.compress(json.dumps(pages, ensure_ascii=False).encode())
    )


def is_of_lab(page: str) -> bool:
    """Return True if a page, such as research/compare, is only for servers, leads and researchers."""
    return any(fnmatch(page, pattern) for pattern in OF_LAB)


def led_outward(text: str, repository: str, version: str) -> str:
    """Return the README for a package index. Links to files in the repository are replaced by links to the same version
    of the files on the web.
    """

    def outward(found: re.Match[str]) -> str:
        return f"{found[1]}({repository}/{'raw' if found[1][0] == '!' else 'blob'}/v{version}/{found[2]})"

    return _INWARD.sub(outward, text)


def parted(project: Mapping[str, Any], lab: bool, version: str) -> dict[str, Any]:
    own, tools = dict(project["project"]), dict(project["tool"]["setuptools"])
    points = {
        group: {name: where for name, where in entries.items() if where.startswith(LAB) == lab}
        for group, entries in own["entry-points"].items()
    }
    own["entry-points"] = {group: entries for group, entries in points.items() if entries}
    tools["package-data"] = {
        name: data for name, data in tools["package-data"].items() if name in ("*", "medsilo") or (name in LAB) == lab
    }
    if lab:
        # with namespaces, setuptools also includes the folders medsilo and medsilo/jobs, which contain only data
        tools["packages"] = {"find": {**tools["packages"]["find"], "namespaces": True}}
        own = {name: own[name] for name in (*OF_BOTH, "entry-points")}
        own |= {
            "name": "medsilo-lab",
            "description": ABOUT,
            "version": version,
            "dependencies": [f"medsilo[lab,page]=={version}"],
        }
    return {"build-system": project["build-system"], "project": own, "tool": {"setuptools": tools}}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    build(*map(Path, sys.argv[1:]))
