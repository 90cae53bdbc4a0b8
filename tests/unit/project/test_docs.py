"""The documentation agrees with the package."""

import ast
import io
import re
import shlex
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from posixpath import normpath

import pytest

from medsilo import __version__
from medsilo.check.disclosure import leaks, leaving
from medsilo.cli import all_commands, main
from medsilo.core.yaml_text import load_yaml
from medsilo.registry import METHODS
from medsilo.site.settings import SiteSettings
from medsilo.tasks.sources import DataSource
from results.result_files import rows_of
from tests.commands import joined, parsed
from tests.conftest import METHODS as FEDERATED
from tests.conftest import make_plan
from tools.links import anchors, for_the_site, is_outward, links, target_of
from tools.methods import FAMILIES
from tools.tables import COMMANDS, ROOT, TABLES, WIDEST, pages, renewed

SCRIPT = re.compile(r"python (benchmarks/[\w/]+\.py)")


def test_every_test_that_a_page_names_exists(root: Path) -> None:
    named = [
        (page.name, *match)
        for page in (*root.glob("docs/**/*.md"), *root.glob("**/README.md"))
        for match in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    ]
    for page, file, test in named:
        assert f"\ndef {test}(" in (root / file).read_text(), f"{page} names {test}"


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in pages()])
def test_tables_are_those_of_the_models(name: str, root: Path) -> None:
    page = (root / name).read_text(encoding="utf-8")
    assert renewed(page) == page, "run 'make docs-tables'"
    changed = re.sub(r"(<!-- table: [\w-]+ -->\n?)", r"\1| another | line |\n", page)
    assert changed != page and renewed(changed) == page, "the test does not detect a change"


def test_every_table_stands_on_a_page() -> None:
    named = [name for page in pages() for name in re.findall(r"<!-- table: ([\w-]+) -->", page.read_text("utf-8"))]
    assert {*named} == {*TABLES}
    assert {*COMMANDS.values()} == {*all_commands()}, "each group of commands has a page"


def test_each_command_and_each_option_has_an_anchor(root: Path) -> None:
    """Links and `medsilo docs` lead to the anchors of commands and options."""
    text = "".join(path.read_text("utf-8") for path in (root / "docs/reference").rglob("*.md"))
    for name in (one.name for group in all_commands().values() for one in group):
        assert f"\n## medsilo {name}\n" in text
    assert {"run--set", "run-job", "kits-make--renew", "training.rounds", "min_patients_per_metric"} <= anchors(text)
    assert all(len(path.read_text("utf-8")) < 20_000 for path in (root / "docs/reference").rglob("*.md"))


def test_every_key_of_every_section_is_in_the_plan_s_tables(root: Path) -> None:
    page = "".join(path.read_text("utf-8") for path in (root / "docs/reference/keys").glob("*.md"))
    for plan in (make_plan("fedsm"), make_plan("harmofl", "task.name=synthetic-prostate")):
        for name, values in plan.resolved().items():
            for key in values if isinstance(values, dict) else ():
                assert f"`{name}.{key}`" in page or f"`{name}.{key}.name`" in page, f"{name}.{key}"


def test_every_key_that_a_page_names_is_one(root: Path) -> None:
    """Keys on pages look like `participation.minimum` or `threads: 1`.

    The test leaves out the keys of NVFlare, of Docker and of medsilo's layers.
    """
    others = {"host", "image", "medsilo", "out", "scheme", "use"}
    made = (make() for name, make in TABLES.items() if not name.startswith("commands-"))
    rows = [line for text in made for line in text.splitlines() if line.startswith("| `")]
    known = {key for row in rows for key in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    sections = {key.partition(".")[0] for key in known if "." in key}
    parts = {
        *others,
        *SiteSettings.model_fields,
        *DataSource.model_fields,
        *(part for key in known for part in key.split(".")),
    }
    for page in root.glob("docs/**/*.md"):
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[:=][^`]*)?`", text):
            last = key.rpartition(".")[2]
            if key.split(".")[0] in sections and last not in ("csv", "html", "json", "jsonl", "py", "yaml"):
                assert key in known or any(own.startswith(f"{key}.") for own in known), f"{page.name}: {key}"
        for key in re.findall(r"`([a-z_]+): [^`]*`", text):
            assert key in parts, f"{page.name}: {key}"


def commands(page: Path) -> Iterator[str]:
    fenced = False
    for line in joined(page.read_text("utf-8")).splitlines():
        fenced ^= line.startswith("```")
        code = line.strip() if fenced or line.startswith("    ") else ""
        if code.startswith("medsilo "):
            command = code.removeprefix("medsilo ").partition(" > ")[0]
            yield re.sub(r"<[^>]*>|…|\.\.\.", "X", command)


def test_every_command_of_a_page_is_one(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = (root / "README.md", *root.glob("docs/**/*.md"))
    found = [(page, line) for page in told for line in commands(page)]
    for page, line in found:
        words = shlex.split(line, comments=True)
        assert parsed(words)[0].partition(" ")[0] == words[0], f"{page.name}: medsilo {line}"
    assert len(found) > 50


def test_commands_of_pages_fit_into_a_line(root: Path) -> None:
    """A command that is longer than one line continues on the next line after a backslash."""
    long = []
    for page in (root / "README.md", *root.glob("docs/**/*.md")):
        code = re.findall(r"^```\w*\n(.*?)^```|^    (medsilo .*?)$", page.read_text("utf-8"), re.M | re.S)
        lines = [line for parts in code for part in parts for line in part.splitlines()]
        long += [line for line in lines if re.match(r"(medsilo|make) ", line) and len(line) > WIDEST]
    assert long == []


def test_the_guide_explains_each_place_of_a_check(root: Path) -> None:
    page = (root / "docs/study/join.md").read_text("utf-8").partition("| where |")[2].partition("\n<!--")[0]
    told = {word.strip() for line in page.splitlines()[1:] for word in line.split("|")[1].split(",")}
    code = "".join(path.read_text() for path in (root / "custom/medsilo/check").glob("*.py"))
    places = set(re.findall(r"(?:Finding|Finding\.stopping|_guarded)\(\s*\"(\w+)\"", code))
    assert len(places) > 8 and places <= told


def names_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(f"{prefix}{node.name}")
        if isinstance(node, ast.ClassDef):
            found |= names_in(node.body, f"{node.name}.")
    return found


def test_the_guides_first_study_is_of_the_hospitals_whose_kits_they_make(root: Path) -> None:
    made = {
        hospital["name"] for hospital in load_yaml((root / "provisioning/consortium.yaml").read_text())["hospitals"]
    }
    for page in ("docs/study/consortium.md", "provisioning/README.md"):
        first = next(
            line for line in joined((root / page).read_text()).splitlines() if line.startswith("medsilo submit jobs")
        )
        named = re.search(r"participation\.sites=\[(.+?)\]", first)
        assert named and {*named[1].split(",")} == made, page


def test_every_place_of_the_newcomers_walk_exists(root: Path) -> None:
    page = (root / "CONTRIBUTING.md").read_text("utf-8")
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py):([\w.]+)`", page, re.M)
    assert [int(number) for number, _, _ in steps] == list(range(1, 11))
    places = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(places) > len(steps)
    for file, name in places:
        path = root / "custom" / (file if file.startswith("medsilo_") else f"medsilo/{file}")
        assert name in names_in(ast.parse(path.read_text("utf-8")).body), f"{file}:{name}"


def rows_of_methods(root: Path) -> dict[str, str]:
    pages = "".join(path.read_text("utf-8") for path in sorted((root / "docs/research/methods").glob("*.md")))
    told = dict(re.findall(r"^\|  \| ([\w-]+) \|\n\|---\|---\|\n\| what travels \| (.+?) \|$", pages, re.M))
    return {name: told[name] for name in METHODS.ours}


def test_the_page_of_methods_says_what_leaves_a_hospital(root: Path) -> None:
    """A method's row in the table begins with the groups of tensors that sites send; remarks follow after a
    semicolon.
    """
    rows = rows_of_methods(root)
    assert {name: told.partition(";")[0] for name, told in rows.items()} == {
        name: leaving(METHODS[name]()) for name in METHODS.ours
    }


def test_each_method_has_a_section_of_one_form(root: Path) -> None:
    """Each method's section on a page has the idea, the formula, the tensors that are sent or stay, the cost, results
    and limits.
    """
    sections = {}
    for page in (root / "docs/research/methods").glob("*.md"):
        for part in page.read_text("utf-8").split("\n## ")[1:]:
            sections[part.partition("\n")[0].lower()] = part
    assert {*sections} == {*METHODS.ours}
    form = (
        "\n\n```math\n",
        "| what travels |",
        "| what stays |",
        "| cost |",
        "| when it helped here |",
        "**Limits.** ",
    )
    for name, part in sections.items():
        places = [part.find(words) for words in form]
        assert -1 not in places and places == sorted(places), name
    assert all({"title", "sends", "suits"} <= vars(METHODS[name]).keys() for name in METHODS.ours)
    assert {*FAMILIES} == {page.stem for page in (root / "docs/research/methods").glob("*.md")}


@pytest.mark.parametrize("method", FEDERATED)
def test_every_group_that_leaves_is_named(method: str, root: Path) -> None:
    """The disclosure report names all groups of tensors that leave a hospital, and the documentation contains the
    groups' titles.
    """
    plan = make_plan(method)
    titles = {group.name: group.title or group.name for phase in plan.course.phases for group in phase.sent}
    told = rows_of_methods(root)[method]
    assert all(titles[leak.group] in told for leak in leaks(plan))
    assert (told == "nothing") == (not leaks(plan))


def test_the_command_says_what_leaves_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "run central with --engine inprocess" in lines["run"]
    for name, cell in rows_of_methods(root).items():
        assert lines[name].endswith(cell.partition(";")[0])


# ------------------------------------------------------------------------------------------------------ versions, words


def test_every_benchmark_that_a_page_names_is_there(root: Path) -> None:
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = page.read_text("utf-8")
        modules = {
            name.rstrip(".").replace(".", "/")
            for name in re.findall(r"python -m ((?:benchmarks|results)\b[\w.]*)", text)
        }
        files = {root / f"{name}.py" for name in modules if not (root / name / "__main__.py").is_file()}
        gone = [str(file) for file in files | {root / name for name in SCRIPT.findall(text)} if not file.is_file()]
        assert gone == [], page.name


def test_intervals_on_pages_are_those_of_the_files(root: Path) -> None:
    """In earlier versions, a page had an interval from three seeds, although its tables were from five seeds."""
    known = set()
    for path in (root / "results").glob("*.csv"):
        for line in (line for line in rows_of(path) if line["low"] and line["high"]):
            ends = round(float(line["low"]), 1), round(float(line["high"]), 1)
            known |= {ends, (-ends[1], -ends[0])}
    for page in ("docs/research/which-method.md", "docs/start/your-data.md"):
        text = (root / page).read_text("utf-8").replace("−", "-")
        found = {(float(low), float(high)) for low, high in re.findall(r"\(([+-][\d.]+) to ([+-][\d.]+)\)", text)}
        assert found and found <= known, (page, found - known)


def test_changelog_and_citation_are_of_this_version(root: Path) -> None:
    changes = (root / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"^## (\S+)", changes, re.M)
    cited = load_yaml((root / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    assert newest and newest[1] == str(cited["version"]) == __version__
    assert (cited["license"], cited["title"]) == (project["license"], project["name"])
    named = re.search(r"\((\S+) names them\)", cited["message"])
    assert named and "| method | paper |" in (root / named[1]).read_text("utf-8")
    assert cited["repository-code"] == project["urls"]["Repository"]
    assert f"tag `v{__version__}`" in changes  # links in the README of the wheel lead to this tag of the repository


def test_the_conda_recipe_requires_what_the_wheels_require(root: Path) -> None:
    recipe = load_yaml((root / "provisioning/conda/recipe.yaml").read_text("utf-8"))
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {
        one.lower().replace("torch>", "pytorch>") for one in [*project["dependencies"], *extras["lab"], *extras["page"]]
    }
    python, *others = recipe["requirements"]["run"]
    assert (
        python == "python >=${{ python_min }}" and f">={recipe['context']['python_min']}" == project["requires-python"]
    )
    assert {one.replace(" ", "") for one in others} == wanted
    assert recipe["context"]["version"] == project["version"]
    assert recipe["build"]["script"][0] == "${{ PYTHON }} provisioning/package_data.py ."
    assert recipe["build"]["python"]["entry_points"] == [f"medsilo = {project['scripts']['medsilo']}"]


# ---------------------------------------------------------------------------------------------------------------- links
def pages_of(root: Path) -> list[Path]:
    folders = ("docs", "jobs", "provisioning", "site_configs", "results", "examples", "skills")
    return [*root.glob("*.md"), *(page for folder in folders for page in root.glob(f"{folder}/**/*.md"))]


def lost(root: Path, page: str, text: str) -> list[str]:
    gone = []
    for link in links(text):
        path, anchor = target_of(page, link)
        if is_outward(link):
            continue
        known = anchors((root / path).read_text("utf-8")) if anchor and path.endswith(".md") else {""}
        if not (root / path).exists() or anchor not in known:
            gone.append(link)
    return gone


def test_every_link_and_anchor_of_a_page_leads_somewhere(root: Path) -> None:
    pages = {page.relative_to(root).as_posix(): page.read_text("utf-8") for page in pages_of(root)}
    assert {name: gone for name, text in pages.items() if (gone := lost(root, name, text))} == {}
    assert sum(len(links(text)) for text in pages.values()) > 200
    wrong = "[a](your-data.md#no-such) [b](none.md) `[c](code.md)` [d](#nor-this)\n```\n[e](fenced.md)\n```\n"
    assert lost(root, "docs/start/install.md", wrong) == ["your-data.md#no-such", "none.md", "#nor-this"]


def test_every_picture_is_on_a_page_and_has_a_dark_version(root: Path) -> None:
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w-]+\.(?:png|svg))", page.read_text("utf-8"))}
    there = {path.name for path in (root / "docs/pictures").iterdir()}
    assert shown <= there and {name.replace("-dark.", ".") for name in there} <= shown
    for name in shown:
        assert name.endswith(".svg") or "-dark." in name or name.replace(".png", "-dark.png") in there, name
    for path in (*(root / "docs/pictures").glob("*.svg"), *(root / "examples/pictures").glob("*.svg")):
        assert "@media (prefers-color-scheme: dark)" in path.read_text("utf-8"), path.name


def test_links_hold_on_the_site_as_well(root: Path) -> None:
    text = (
        "[a](docs/reference/keys.md#training) [b](jobs/fedbn) [c](provisioning) [d](#here) [e](https://example.org/x)"
    )
    assert links(for_the_site(text, "README.md")) == [
        "reference/keys.md#training",
        "repository/jobs/fedbn.md",
        "repository/provisioning/README.md",
        "index.md#here",
        "https://example.org/x",
    ]
    assert links(for_the_site("[a](../../README.md) [b](../reference/keys.md)", "docs/start/install.md")) == [
        "../index.md",
        "../reference/keys.md",
    ]


def test_every_page_is_in_the_site_s_navigation(root: Path) -> None:
    written = (root / "mkdocs.yml").read_text("utf-8")
    named = set(re.findall(r"[\w/.-]+\.md$", written, re.M))
    outside = {name for name in named if name.startswith("repository/")}
    pages = {page.relative_to(root / "docs").as_posix() for page in root.glob("docs/**/*.md")}
    assert named - outside == pages
    assert all((root / name.removeprefix("repository/")).is_file() for name in outside)


# files that pages and comments name, but that exist only in a kit, a bundle, an export or an example
ELSEWHERE = {
    "local/custom/site_guard.py": "a kit",
    "startup/start.sh": "a kit",
    "startup/stop_fl.sh": "a kit",
    "stop_fl.sh": "a kit",
    "fl.example.org/keep-running.sh": "a kit",
    "st-anna/keep-running.sh": "a kit",
    "clinic.example/startup/fl_admin.sh": "a kit",
    "MODEL_CARD.md": "an export",
    "docs/README.md": "a MONAI bundle",
    "docs/SWARM_FAILURE_MODES.md": "MediSwarm",
    "upstream/NAME.md": "NAME stands for each issue's",
    "random.py": "a module of Python's that a user's file may hide",
    "index.md": "the site",
    "tests/test_lg_fedavg.py": "a package of the reader's",
    "tests/test_gait.py": "a package of the reader's",
}
OWN_FILE = re.compile(r"(?<![\w/<>*.{}-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|ipynb|toml))\b(?![(/])")


def told_in(path: Path) -> Iterator[str]:
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


class Tree:
    def __init__(self, listed: Sequence[str]) -> None:
        parts = [PurePosixPath(name).parts for name in listed]
        self.places = {"/".join(own[:end]) for own in parts for end in range(1, len(own) + 1)}
        self.ends = {"/".join(own[first:]) for own in parts for first in range(len(own))}
        self.tops = {own[0] for own in parts if len(own) > 1 and own[0][0] != "."}

    def lacks(self, name: str, within: str) -> bool:
        """Return True if no path in the repository equals or ends with this path, which may be relative to the root or
        to `within`.
        """
        if name in self.places or normpath(PurePosixPath(within).parent / name) in self.places:
            return False
        # a path from the root must exist as a whole, and not only as the end of another path
        if name.partition("/")[0] in self.tops:
            return "*" not in name or not any(fnmatch(own, name) for own in self.places)
        return name not in self.ends


def test_every_path_that_a_page_a_docstring_or_a_comment_names_leads_somewhere(root: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    tree = Tree(listed)
    below = re.compile(rf"(?<![\w/<>*.{{}}:-])((?:{'|'.join(sorted(tree.tops))})/[\w./*{{}}<>-]*\w)")

    def lost_in(text: str, name: str) -> set[tuple[str, str]]:
        own = ELSEWHERE | dict.fromkeys(re.findall(r"acme_gait/\w+\.py", text) if "extend.md" in name else ())
        named = [*OWN_FILE.findall(text), *(one for one in below.findall(text) if not {*one} & {*"<>{}"})]
        return {(name, one) for one in named if one not in own and tree.lacks(one, name)}

    lost = set()
    for name in listed:
        if not name.endswith((".py", ".md", ".yaml", ".ipynb", ".toml")) or name == "pyproject.toml":
            continue
        if re.match(r"tests/artefacts/\d", name):
            continue
        # a fast search over the whole file; a slow search leaves out code, and runs only if the fast search finds
        # something
        if lost_in((root / name).read_text("utf-8"), name):
            lost |= {own for text in told_in(root / name) for own in lost_in(text, name)}
    assert not lost
    for wrong in ("exact.py", "federation/place.py", "docs/python.md", "results/none/*.csv", "custom/site_guard.py"):
        assert tree.lacks(wrong, "custom/medsilo/plan.py"), wrong


def test_packages_that_know_tensors_only_are_there(root: Path) -> None:
    page = " ".join((root / "CONTRIBUTING.md").read_text("utf-8").split())
    named = re.findall(r"`(\w+)`", page.partition("import NVFlare. ")[2].partition(" only compute on tensors")[0])
    assert len(named) > 3
    assert [name for name in named if not (root / "custom/medsilo" / name / "__init__.py").is_file()] == []


def test_each_folder_at_the_top_has_a_place(root: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    there = {path.partition("/")[0] for path in listed.splitlines() if "/" in path and path[0] != "."}
    text = (root / "CONTRIBUTING.md").read_text("utf-8").partition("### Folders")[2].partition("###")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == there
    assert not [path for path in listed.splitlines() if path.startswith("docs/") and path.endswith(".py")]
    product = [*(root / "custom").rglob("*.py"), *(root / "provisioning").rglob("*.py")]
    evidence = re.compile(r"^\s*(?:from|import) (?:results|benchmarks)\b", re.MULTILINE)
    assert not [path for path in product if evidence.search(path.read_text("utf-8"))]
