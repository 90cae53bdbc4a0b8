"""`medsilo docs` prints the documentation of an installed package, even if the repository is missing."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from medsilo.cli import documentation, main
from medsilo.cli.documentation import all_passages, in_signs, named, passages_of, search, shown, stem, unwrapped
from medsilo.core.yaml_text import load_yaml
from provisioning.wheels import LAB, OF_LAB, is_of_lab, write_pages
from tests.federation.test_without_the_lab import HIDDEN
from tests.sources import modules, tree_of
from tools.words import helps, messages, templates

PASSAGES = all_passages()
# for at least 19 of 20 questions, the first search results name the right page
TWO_CLICKS = 0.95
FIRST = 5


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["docs", *words]) == 0
    return capsys.readouterr().out


def test_a_key_shows_its_values_and_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    whole = said(capsys, "training.learning_rate")
    assert "(0.01)" in whole and "learning rate of the optimizer" in whole and "reference/keys/training" in whole
    assert said(capsys, "learning_rate") == whole
    assert "min_patients_per_metric" in said(capsys, "min_patients_per_metric")


def test_a_command_shows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["kits", "make"], ["medsilo", "kits", "make"], ["medsilo kits make"]):
        text = said(capsys, *words)
        assert "--renew NAME" in text and "for its new members" in text
    assert "medsilo docs research/compare" in said(capsys, "compare"), "the output must name the page of the same name"


def test_a_page_is_printed_whole_with_places_for_its_links(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "docs/study/join.md")
    assert text == said(capsys, "study/join") == said(capsys, "join")
    assert "[start/your-data]" in text and "1. Describe your data" in text and "](" not in text
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("    "))
    part = said(capsys, "study/join#your-limits")
    assert len(part) < len(text) / 4


def test_a_pasted_message_finds_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "medsilo: st-anna: the training process died (SIGKILL)")
    assert "ran out of memory" in text and "training.batch_size" in text
    assert "lower training.learning_rate" in said(capsys, "training diverged in round 3 at site-2")


def test_words_are_searched_and_nothing_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "firewall", "--json"]) == 0
    places = [one["place"] for one in json.loads(capsys.readouterr().out)["found"]]
    assert places and all(named(PASSAGES, place) for place in places)
    assert main(["docs", "xyzzyq"]) == 1
    assert "medsilo docs" in capsys.readouterr().err
    listed = [line.split()[0] for line in said(capsys).splitlines() if line][:-1]
    assert "start/install" in listed and listed == sorted({*listed})


def test_formulas_are_readable_in_a_terminal() -> None:
    assert in_signs(r"w \leftarrow \sum_k p_k w_k") == "w ← Σ _k p_k w_k".replace("Σ _", "Σ _")
    assert in_signs(r"\frac{\mu}{2} \lVert w - w_t \rVert^2") == "(μ)/(2) ‖w - w_t ‖^2"


@pytest.mark.slow
def test_each_pointer_of_the_program_is_to_a_page_that_is_there(root: Path) -> None:
    """Errors, help and pages refer to `medsilo docs PLACE`, and never to paths in the repository."""
    texts = [one.text for one in (*helps(), *messages(), *templates())]
    code = [path.read_text("utf-8") for path in root.glob("custom/**/*.py")]
    pointers = {place for text in code for place in re.findall(r"medsilo docs ([a-z]+(?:[/#-][a-z-]+)*)", text)}
    assert len(pointers) > 10
    assert [place for place in sorted(pointers) if not named(PASSAGES, place)] == []
    assert [text for text in texts if re.search(r"\bdocs/\w+|\bsite/reference|provisioning/README", text)] == []


@pytest.mark.slow
def test_pages_come_with_the_wheel(root: Path, tmp_path: Path) -> None:
    """`medsilo docs` prints the same pages from the two wheels and from a checkout of the repository.

    The hospital's wheel has the pages for hospitals. For a page that is not for hospitals, `medsilo docs` names the
    wheel medsilo-lab.
    """
    for name in ("medsilo", "nvflare_reliability"):
        shutil.copytree(root / "custom" / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))

    def said(words: list[str], *places: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
        command = [sys.executable, "-m", "medsilo", "docs", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    without = said(["study/join"], tmp_path)
    assert without.returncode == 1 and "install medsilo again" in without.stderr
    write_pages(root, tmp_path / "medsilo", lab=False)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text(HIDDEN)
    alone = (tmp_path / "hidden", tmp_path)
    listed = said([], *alone).stdout
    assert "study/join" in listed and "research/compare" not in listed and "come with medsilo-lab" in listed
    page = said(["study/join"], *alone)
    assert page.returncode == 0 and "1. Describe your data" in page.stdout and "medsilo-lab" not in page.stderr
    assert "come with medsilo-lab" in said(["research/compare"], *alone).stdout
    nothing = said(["xyzzyq"], *alone)
    assert nothing.returncode == 1 and "come with medsilo-lab" in nothing.stderr
    write_pages(root, tmp_path / "medsilo", lab=True)
    for words in (["study/join"], ["research/compare"], ["provisioning"], ["training.rounds"], ["check"], []):
        done = said(words, tmp_path)
        assert done.returncode == 0 and len(done.stdout) > 100, done.stderr
        assert done.stdout == said(words, root / "custom").stdout


def test_a_hospital_s_wheel_has_each_page_that_a_hospital_s_program_names(root: Path) -> None:
    pages = documentation.pages_of(root)
    assert all(any(fnmatch(page, pattern) for page in pages) for pattern in OF_LAB)
    code = [
        path.read_text("utf-8")
        for path in root.glob("custom/**/*.py")
        if path.relative_to(root / "custom").parts[0] not in LAB
    ]
    # the author of a script, who has medsilo-lab, reads messages that name medsilo-lab
    named_pages = {
        page for text in code for page in re.findall(r"(?<!with medsilo-lab: )medsilo docs ([a-z-]+/[a-z/-]+)", text)
    }
    assert {"study/join", "trust/privacy"} <= named_pages <= pages.keys()
    assert "research/own-script" in pages
    assert [page for page in sorted(named_pages) if is_of_lab(page)] == []


def test_a_hospital_s_wheel_has_no_module_that_needs_the_other_wheel(root: Path) -> None:
    """Only functions that run with medsilo-lab import packages of medsilo-lab."""
    needing = {
        name
        for name, path in modules().items()
        if name.partition(".")[0] not in LAB
        for node in tree_of(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if one.partition(".")[0] in LAB
    }
    assert needing == set()


def test_questions_of_a_new_user_have_answers_in_two_clicks(root: Path) -> None:
    questions = load_yaml((root / "tests/questions.yaml").read_text("utf-8"))
    assert len(questions) == len({question["ask"] for question in questions}) >= 100
    lost = {}
    for question in questions:
        exact = [one.place for one in PASSAGES if one.is_about(question["ask"])]
        places = exact or [one.place for one in search(PASSAGES, question["ask"])[:FIRST]]
        if not any(
            place == own or place.startswith((f"{own}#", f"{own}/")) for place in places for own in question["answers"]
        ):
            lost[question["ask"]] = places
    assert len(lost) <= (1 - TWO_CLICKS) * len(questions), lost


def test_a_search_lists_each_place_once_and_knows_synonyms() -> None:
    for words in ("training loop", "the machine of a hospital", "out of memory"):
        places = [one.place for one in search(PASSAGES, words)]
        assert len(places) == len({*places}) > 3
    assert "study/consortium#choose-a-method" in [one.place for one in search(PASSAGES, "pick an algorithm")]


def test_a_paragraph_that_begins_in_bold_is_found_by_its_first_words() -> None:
    [first, *_] = search(PASSAGES, "back up the kit of a site")
    assert first.place == "study/join#what-the-machine-needs" and "startup/" in first.text and len(first.text) < 300


@pytest.mark.parametrize(
    "words",
    [
        "stop stops stopped stopping",
        "encrypt encrypted encrypts encryption",
        "reproduce reproducible reproducibility",
        "evaluate evaluated evaluation evaluator",
        "class classes",
        "normalise normalised normalisation normalize normalization",
    ],
)
def test_forms_of_a_word_have_one_stem(words: str) -> None:
    assert len({stem(word) for word in words.split()}) == 1
    assert len({stem(word) for word in ("table", "port", "image", "patient", "loss", "server")}) == 6


def test_a_search_shows_the_answer_beside_a_question_and_the_whole_row_of_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "Can we leave a study?")
    assert (
        "study/help#questions" in text and "\n    The hospital's engineer runs medsilo approve HASH --decline" in text
    )
    text = said(capsys, "What do I do when a hospital's disk is full?")
    assert "    a hospital's disk is full — the hospital frees space" in text


def test_joined_lines_print_as_the_lines_of_the_page(root: Path) -> None:
    """The packed pages have no line breaks in paragraphs; headings, lists, tables and code stay as they are."""
    joined = 0
    for path in (root / "docs").rglob("*.md"):
        text, page = path.read_text("utf-8"), path.relative_to(root / "docs").with_suffix("").as_posix()
        one, other = ([(p.place, p.title, shown(p, 88)) for p in passages_of(page, t)] for t in (text, unwrapped(text)))
        assert one == other, page
        joined += text.count("\n") - unwrapped(text).count("\n")
    assert joined > 1000


def test_a_page_prints_each_row_once_and_a_command_s_name_is_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    whole = said(capsys, "help")
    assert whole.count("command not found") == whole.count("fed_admin.json: tampered") == 1
    assert not any(one.is_about("test my script before I submit it") for one in PASSAGES)


def test_each_place_of_an_answer_is_there(root: Path) -> None:
    for question in load_yaml((root / "tests/questions.yaml").read_text("utf-8")):
        assert all(named(PASSAGES, place) for place in question["answers"]), question
    assert documentation.pages() == documentation.pages_of(root)


@pytest.mark.slow
def test_the_readme_s_python_runs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs the README's Python code with fewer rounds, and checks that the recipe in the README exists."""
    import medsilo
    import medsilo.client
    from medsilo.recipes import FedBNRecipe

    text = (root / "README.md").read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    assert f"from medsilo.recipes import {FedBNRecipe.__name__}" in text and f"import {medsilo.client.__name__}" in text
    monkeypatch.chdir(tmp_path)
    short = code.replace('plan="fedbn"', 'plan="fedbn", changes="training.rounds=1"')
    assert short != code
    names: dict[str, object] = {}
    exec(short, names)
    assert len(names["comparison"].table) == 3  # type: ignore[attr-defined]
