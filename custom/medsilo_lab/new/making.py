"""Write the package of a new method, task or network from templates."""

import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError
from medsilo.registry import TABLES

HERE = Path(__file__).parent
# kind of plug-in → the plug-in's section in a plan, and the arguments with which the plug-in's test starts a run
KINDS = {
    "method": ("algorithm", '"fedavg", method={}, changes={{"training.rounds": 2, "task.patients": 4}}'),
    "task": ("task", 'task={}, sites=["a", "b"], changes={{"training.rounds": 2}}'),
    "network": ("network", '"fedavg", model={}, changes={{"training.rounds": 2, "task.patients": 4}}'),
}


def new(
    screen: Console,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="method, task or network")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the new class in plans, such as my-method")],
    *,
    out: options.OutFolderOrNone = None,
) -> int:
    """Write a package as a start for your own method, task or network. The package contains a small working example and
    its test.

    After you install the package beside medsilo, plans may use the new name. Each hospital allows the package in its
    medsilo.yaml.
    """
    if kind not in KINDS:
        raise MedsiloError(f"KIND: {kind!r} is not known; choose method, task or network")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise MedsiloError(
            f"NAME: {name!r} has invalid characters; use lower-case letters, digits and '-', like my-{kind}"
        )
    section, given = KINDS[kind]
    folder, module, title = out or Path(name), name.replace("-", "_"), name.title().replace("-", "")
    if name in TABLES[section] or folder.exists():
        why = f"{folder} is there already" if folder.exists() else f"{name} is a {kind} already"
        raise MedsiloError(f"{why}; choose another name")
    words = {"name": name, "module": module, "Name": title, "kind": kind, "given": given.format(title)}
    files = {"pyproject.toml": "pyproject", f"{module}/{kind}.py": kind, f"tests/test_{kind}.py": "test"}
    for file, template in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        text = Template((HERE / f"{template}.template").read_text("utf-8")).substitute(words)
        (folder / file).write_text(text, encoding="utf-8")
        screen.say(str(folder / file))
    (folder / module / "__init__.py").touch()
    tried = f"medsilo run jobs/fedavg --set {section}.name={name}"
    screen.say(f"next: pip install -e {folder}; python -m pytest {folder}; {tried}")
    screen.answer(folder=folder, files=list(files))
    return 0
