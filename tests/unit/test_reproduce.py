"""docs/research/reproduce.md: every command is one that would run, were the data there."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import parsed
from tests.conftest import wanted

TEXT = (Path(__file__).resolve().parents[2] / "docs/research/reproduce.md").read_text()
COMMANDS = re.findall(r"^    medsilo (.+)$", TEXT, re.MULTILINE)
# The papers' networks are large, and a plan is only right when its networks can be built.
BY_SIZE = [pytest.param(line, marks=pytest.mark.long) if "compare --plan" in line else line for line in COMMANDS]


@pytest.mark.slow
@pytest.mark.parametrize("command", BY_SIZE)
def test_the_command_is_one(command: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    name, values = parsed(shlex.split(command))
    if name == "compare":
        cells = replace(wanted(shlex.split(command)), seeds=[0]).all_cells()
        assert len(cells) >= 2
        names = {cell.row.title for cell in cells}
        assert values["baseline"] is None or values["baseline"] in names
    if name == "run":
        from medsilo.plan import load_plan

        assert list(load_plan(values["plan"], values["changes"]).participation.evaluation_sites) == ["rim-one"]
