"""Test other packages' features that no plan names, and the examples of medsilo.extend."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import medsilo
from medsilo import extend, registry
from medsilo.cli import PLUGGED_IN, all_commands, main
from medsilo.cli.review import PAGES
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.tasks.inference import Inference
from medsilo_lab.cli.running import REPORTS
from medsilo_lab.deploy.exporter import EXPORTERS, export
from medsilo_lab.deploy.predictor import PREDICTORS
from medsilo_lab.deploy.source import Source
from medsilo_lab.start.dataset_layout import DATASET_PROBES
from tests.conftest import make_plan
from tests.unit.schedule.test_extend import a_distribution

OUTSIDE = """
from pathlib import Path

from medsilo.extend import Command, Console
from medsilo_lab.extend import Exporter, Predictor


def count_letters(screen: Console, text: str, times: int = 1) -> int:
    "Count the letters of a text."
    screen.say(f"letters: {len(text) * times}")
    screen.answer(letters=len(text) * times)
    return 0


class Letters(Predictor):
    cases = "texts"

    def predict(self) -> int:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "predictions.json").write_text('{"cases": [{"file": "%s"}]}' % self.given[0].name)
        return 0


class Size(Exporter):
    what = "size"

    def write(self, out: Path) -> dict[str, bytes]:
        size = sum(tensor.numel() for tensor in self.source.network.state_dict().values())
        return {"told/size.txt": str(size).encode()}


COUNT = Command(count_letters, "text --times 2", "For people who count")
"""
ENTRIES = """
[medsilo.commands]
count-letters = counting:COUNT
broken = counting:Nothing
[medsilo.predictors]
texts = counting:Letters
[medsilo.exporters]
size = counting:Size
wrong = counting:Letters
"""


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(a_distribution(tmp_path / "place", "acme-counting", ENTRIES, counting=OUTSIDE))
    yield
    sys.modules.pop("counting", None)


def test_a_command_of_another_package(counting: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "count-letters" in (told := capsys.readouterr().out) and "a command of package acme-counting" in told
    # medsilo imports no module of the package before running the package's command
    assert "counting" not in sys.modules
    assert main(["count-letters", "abc", "--times", "2"]) == 0
    assert capsys.readouterr().out == "letters: 6\n"
    assert main(["broken"]) == 2
    assert "package acme-counting: 'broken'" in capsys.readouterr().err
    assert main(["list"]) == 0  # other plug-ins work although one plug-in is broken


def test_an_outside_command_that_is_not_named_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count-letters", "abc"]) == 2
    assert "is no command" in capsys.readouterr().err


def test_a_predictor_of_another_package(counting: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`medsilo predict` and `medsilo.predict` use another package's predictor for any files."""
    run = medsilo.run(make_plan(), folder=tmp_path / "run", changes=["training.rounds=1"], device="cpu")
    text = tmp_path / "letter.txt"
    text.write_text("a")
    with pytest.raises(MedsiloError, match="reads no files.*nothing to predict"):
        medsilo.predict(run.folder, text, tmp_path / "none")
    monkeypatch.setattr(type(run.plan.task), "use", Inference("texts"))
    assert medsilo.predict(run.folder, text, tmp_path / "out") == [{"file": "letter.txt"}]
    assert main(["predict", str(run.folder), str(text), "-o", str(tmp_path / "again")]) == 0


def test_an_exporter_of_another_package(counting: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan()
    source = Source(plan.algorithm.whole(plan.build_networks()), plan, {"kind": "model"})
    assert export(source, tmp_path / "out", "size") == "size"
    assert int((tmp_path / "out/told/size.txt").read_text()) > 0 and (tmp_path / "out/MODEL_CARD.md").is_file()
    with pytest.raises(PlanError, match="'wrong' .*medsilo_lab.deploy.exporter:Exporter"):
        export(source, tmp_path / "other", "wrong")
    assert main(["release", "export", "run", "-o", str(tmp_path / "new"), "--to", "paper"]) == 2
    assert "choose one of monai, nnunet, size, wrong" in capsys.readouterr().err


def test_the_plugins_that_come_with_medsilo_are_attached_as_others() -> None:
    tables = [value for value in vars(registry).values() if isinstance(value, registry.PluginTable)]
    assert len(tables) == 5
    for table in (*tables, PLUGGED_IN, REPORTS, PAGES, EXPORTERS, DATASET_PROBES, PREDICTORS):
        for name in table:
            assert table[name] is not None and table.package_of(name) is None
    assert {"release make", "nnunet plan"} <= {one.name for own in all_commands().values() for one in own}


def test_the_page_uses_what_is_for_everybody(root: Path) -> None:
    page = (root / "docs/research/extend.md").read_text("utf-8")
    code = [ast.parse(dedent(text)) for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    imports = [node for tree in code for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    used = {(node.module, one.name) for node in imports for one in node.names}
    ours = {name for module, name in used if module == "medsilo.extend"}
    assert len(ours) >= 7 and ours <= {*extend.__all__}
    assert not [module for module, _ in used if str(module).startswith("medsilo.") and module != "medsilo.extend"]


def test_an_installation_of_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update of a checkout without 'make', the plug-ins' files exist, but not their entry points."""
    monkeypatch.setattr(registry, "_entries", lambda group, path: {})
    with pytest.raises(PlanError, match=r"'nnunet' .*install it again \('make'\)"):
        make_plan("fedavg", "task.name=nnunet")
