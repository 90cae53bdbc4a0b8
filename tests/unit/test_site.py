"""The documentation as a site: `make docs` builds it, and its pages load nothing from other hosts."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from docs.links import ROOT
from docs.site import SETTINGS, build, write_pages
from medsilo.core.yaml_text import load_yaml

pytestmark = pytest.mark.slow
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class Loaded(HTMLParser):
    """The addresses that a page loads by itself."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name == LOADING.get(tag)]


def is_elsewhere(address: str) -> bool:
    return re.match(r"(https?:)?//", address) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="needs requirements-docs.txt")
    folder = tmp_path_factory.mktemp("site")
    write_pages(folder / "pages")
    done = build(settings(), folder / "pages", folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def settings() -> dict[str, Any]:
    """What mkdocs.yml says."""
    return load_yaml(SETTINGS.read_text("utf-8"))


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = {page: Loaded(page.read_text("utf-8")).addresses for page in site.rglob("*.html")}
    assert sum(map(len, pages.values())) > 500
    assert {page.name: found for page, all_of in pages.items() if (found := [*filter(is_elsewhere, all_of)])} == {}
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()[\s\"']*(https?:)?//", sheet.read_text("utf-8")), sheet.name
    assert Loaded('<script src="//cdn.example/x.js"></script><img src="a.png">').addresses == [
        "//cdn.example/x.js",
        "a.png",
    ]


def test_what_pages_load_and_link_to_is_there(site: Path) -> None:
    """Also source files, jobs and READMEs, which are not in docs/."""
    count = 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # its addresses begin at the site's own root
        text = page.read_text("utf-8")
        links = re.findall(r"<a [^>]*href=\"?([^\" >#]+)", text)
        for address in {*links, *Loaded(text).addresses}:
            path = address.partition("?")[0].partition("#")[0]
            if not is_elsewhere(path):
                count += 1
                assert (page.parent / path).exists(), f"{page.relative_to(site)}: {address}"
    assert count > 2000


def test_pages_read_as_in_the_repository(site: Path) -> None:
    """Lists, tables and bold words that the site's parser did not see would stand there as typed."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text("utf-8"), flags=re.S)
        paragraphs = re.findall(r"<p>(.*?)</p>", text, re.S)
        wrong = [found for found in paragraphs if re.search(r"^ *([-*] |\|.*\|$)|\*\*|^```", found, re.M)]
        assert not wrong, f"{page.name}: {wrong[0]}"


def test_source_files_and_folders_are_pages(site: Path) -> None:
    assert "class FedAvg" in re.sub(
        r"<[^>]+>", "", (site / "repository/custom/medsilo/methods/fedavg.py.html").read_text()
    )
    assert "config_fed_server.json" in (site / "repository/jobs/fedavg.html").read_text("utf-8")


def test_files_of_results_are_there_as_they_are(site: Path) -> None:
    name = "results/shift.csv"
    assert (site / "repository" / name).read_text("utf-8") == (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("wrong", ["other.md#gone", "#gone", "none.md"])
def test_a_lost_link_or_anchor_fails_the_build(tmp_path: Path, wrong: str) -> None:
    pytest.importorskip("zensical", reason="needs requirements-docs.txt")
    own = {key: value for key, value in settings().items() if key != "nav"}
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "other.md").write_text("# Other\n")
    for link, code in (("other.md#other", 0), (wrong, 1)):
        (pages / "index.md").write_text(f"# Home\n\n[there](other.md#other) [perhaps]({link})\n")
        done = build(own, pages, tmp_path / "out")
        assert done.returncode == code, done.stderr
    assert "does not exist" in done.stderr and (tmp_path / "out/index.html").is_file()
