"""The command that writes the package of a new method, task or network: new."""

import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from medsilo.extend import TABLES, Command, MedsiloError, Screen

PROJECT = Template("""\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1"
dependencies = ["medsilo"]

[project.entry-points."medsilo.${kind}s"]
$name = "$module.$kind:$Name"

[tool.setuptools]
packages = ["$module"]
""")
TEST = Template("""\
\"\"\"It learns from hospitals that are drawn. Run: python -m pytest\"\"\"

import medsilo
from $module.$kind import $Name


def test_it_runs(tmp_path) -> None:
    run = medsilo.run($given, changes={"training.rounds": 2}, folder=tmp_path / "run", device="cpu")
    assert run.summary.status == "finished" and 0 <= run.summary.mean_test <= 1
""")
METHOD = Template("""\
\"\"\"$Name: which tensors travel, how they are mixed, and what a site trains.\"\"\"

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from medsilo.extend import Algorithm, Group, Phase, Training


class $Name(Algorithm):
    title = "$Name"
    paper = "not published"
    name: Literal["$name"] = "$name"

    def phases(self, training: Training) -> Sequence[Phase]:
        return [Phase("train", training.rounds, (Group("model", self.shared, title="the model"),))]

    def shared(self, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        return dict(modules["model"].state_dict())  # averaged by numbers of cases
""")
NETWORK = Template("""\
\"\"\"$Name: a network for flat images.\"\"\"

from typing import Literal

from pydantic import Field
from torch import nn

from medsilo.extend import Network


class $Name(Network):
    name: Literal["$name"] = "$name"
    width: int = Field(16, ge=1, le=512, description="channels of the convolution")

    def build(self, channels: int, classes: int) -> nn.Module:
        filters, scores = nn.Conv2d(channels, self.width, 5, padding=2), nn.Linear(16 * self.width, classes)
        return nn.Sequential(filters, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), scores)
""")
TASK = Template("""\
\"\"\"$Name: where a hospital's cases come from, and what is learned of them.\"\"\"

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from medsilo.extend import Classification, Network, SiteData, Task, network, split_by_patient


class $Name(Task):
    title: ClassVar[str] = "$Name"
    channels: ClassVar[int] = 3
    shape: ClassVar[tuple[int, ...]] = (3,)
    goal: ClassVar[Classification] = Classification(("well", "ill"))

    name: Literal["$name"] = "$name"

    def default_network(self) -> Network:
        return network("linear")

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        if folder is None:  # drawn, for the test; with `needs_data: ClassVar[bool] = True` there is always a folder
            values = np.random.default_rng(seed).normal(size=(60, 3))
            labels, patients = (values[:, 0] > 0).astype(int), np.arange(60) // 2  # two cases of each patient
        else:
            with np.load(folder / site / "cases.npz", allow_pickle=False) as own:
                values, labels, patients = own["values"], own["labels"], own["patients"]
        names = [f"{site}-{number}" for number in range(int(patients.max()) + 1)]
        return split_by_patient(values, labels, patients, names)
""")
KINDS = {  # by what is made: its file, a plan's section, what its test runs
    "method": (METHOD, "algorithm", '"fedavg", method={}'),
    "task": (TASK, "task", 'task={}, sites=["a", "b"]'),
    "network": (NETWORK, "network", '"fedavg", model={}'),
}


def new(
    screen: Screen,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="method, task or network")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="its name in plans, like my-method")],
    *,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FOLDER", help="the folder (default: NAME)")
    ] = None,
) -> int:
    """Write a package with a small method, task or network that works, and its test, to go on from.

    Install it where medsilo is installed: plans may use its name then. Hospitals allow it in their medsilo.yaml.
    """
    if kind not in KINDS:
        raise MedsiloError(f"KIND: {kind!r} is not known; choose method, task or network")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise MedsiloError(f"NAME: {name!r} has odd characters; write small letters, digits and '-', like my-{kind}")
    body, section, given = KINDS[kind]
    folder, module, title = out or Path(name), name.replace("-", "_"), name.title().replace("-", "")
    if name in TABLES[section] or folder.exists():
        why = f"{folder} is there already" if folder.exists() else f"{name} is a {kind} already"
        raise MedsiloError(f"{why}; choose another name")
    words = {"name": name, "module": module, "Name": title, "kind": kind, "given": given.format(title)}
    files = {"pyproject.toml": PROJECT, f"{module}/{kind}.py": body, f"tests/test_{kind}.py": TEST}
    for file, template in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(template.substitute(words), encoding="utf-8")
        screen.say(str(folder / file))
    (folder / module / "__init__.py").touch()
    tried = f"medsilo run jobs/fedavg --set {section}.name={name}"
    screen.say(f"next: pip install -e {folder}; python -m pytest {folder}; {tried}")
    screen.answer(folder=folder, files=list(files))
    return 0


NEW = Command(new, "method my-method", "Lists and templates")
