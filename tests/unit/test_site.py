"""The documentation as a site: `make docs` builds it, and its pages load nothing from other hosts."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from docs.links import ROOT
from medsilo.core.files import load_yaml

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


def built(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = built(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


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
    assert "config_fed_server.json" in (site / "repository/jobs/fedbn.html").read_text("utf-8")


def test_a_lost_anchor_fails_the_build(tmp_path: Path) -> None:
    settings = load_yaml((ROOT / "mkdocs.yml").read_text("utf-8"))
    own = {key: value for key, value in settings.items() if key not in ("hooks", "nav", "not_in_nav", "exclude_docs")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(own))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Home\n\n[there](other.md#other) [gone](other.md#gone)\n")
    (tmp_path / "docs/other.md").write_text("# Other\n")
    done = built(tmp_path, tmp_path / "out")
    assert done.returncode == 1 and "'#gone'" in done.stderr and "'#other'" not in done.stderr
