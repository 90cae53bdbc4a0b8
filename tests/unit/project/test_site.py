"""`make docs` builds a site of the documentation, whose pages load nothing from other hosts."""

import re
import time
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from medsilo.core.yaml_text import load_yaml
from tests.browser import Browser, chromium
from tools.links import ROOT
from tools.site import SETTINGS, build, write_pages

LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class Loaded(HTMLParser):
    """Collect the addresses from which a page loads files without a click."""

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
    pytest.importorskip("zensical", reason="needs pyproject.toml's group docs")
    folder = tmp_path_factory.mktemp("site")
    write_pages(folder / "pages")
    done = build(settings(), folder / "pages", folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def settings() -> dict[str, Any]:
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
    count = 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # the site's 404 page has addresses that begin at the root
        text = page.read_text("utf-8")
        links = re.findall(r"<a [^>]*href=\"?([^\" >#]+)", text)
        for address in {*links, *Loaded(text).addresses}:
            path = address.partition("?")[0].partition("#")[0]
            if not is_elsewhere(path):
                count += 1
                assert (page.parent / path).exists(), f"{page.relative_to(site)}: {address}"
    assert count > 2000


def test_pages_read_as_in_the_repository(site: Path) -> None:
    """Each list, table and bold word is rendered, and no page shows Markdown characters."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text("utf-8"), flags=re.S)
        paragraphs = re.findall(r"<p>(.*?)</p>", text, re.S)
        wrong = [found for found in paragraphs if re.search(r"^ *([-*] |\|.*\|$)|\*\*|^```", found, re.M)]
        assert not wrong, f"{page.name}: {wrong[0]}"


def test_formulas_are_mathml_and_pictures_have_two_forms(site: Path) -> None:
    page = (site / "research/methods/appearance.html").read_text("utf-8")
    assert page.count("<math") >= 5 and "\\leftarrow" not in page
    text = (site / "research/which-method.html").read_text("utf-8")
    assert "which-method-light.svg#only-light" in text and "which-method-dark.svg#only-dark" in text
    for name in ("which-method", "architecture"):
        light, dark = ((site / f"pictures/{name}-{scheme}.svg").read_text("utf-8") for scheme in ("light", "dark"))
        assert "@media not all" in light and "@media all" in dark
    examples = (site / "repository/examples/index.html").read_text("utf-8")
    for name in re.findall(r'src="?pictures/([^" >#]+)', examples):
        assert name.endswith(("-light.svg", "-dark.svg")) and (site / "repository/examples/pictures" / name).is_file()
    assert examples.count("-dark.svg#only-dark") == 4


@pytest.mark.slow
def test_search_works_from_a_folder_and_pages_fit(site: Path, server: str, tmp_path: Path) -> None:
    """A real browser opens the pages on a screen of 1400 pixels and on a phone's screen of 400 pixels."""
    with chromium(tmp_path / "browser") as browser:
        for width in (1400, 400):
            browser.size(width, 900, phone=width == 400)
            for page in ("index", "research/methods", "research/methods/personal", "reference/keys/task", "study/help"):
                browser.open(site / f"{page}.html")
                assert browser.ask("document.documentElement.scrollWidth") <= width, (page, width)
        browser.size(1400, 900)
        for place in (site.as_uri(), server):
            for question, page in FOUND.items():
                addresses = results(browser, place, question)[:5]
                assert any(address.startswith(page) for address in addresses), (question, addresses)
                assert not browser.complaints


# Questions of a new user, and a page that the site's search lists among its first five results.
FOUND = {
    "firewall": "study/consortium",
    "which ports must the firewall open": "study/join",
    "a hospital went offline during training": "trust/reliability",
    "how do I cite the methods in a paper": "study/help",
    "one hospital has no column for a variable": "start/your-data",
}


def results(browser: Browser, place: str, question: str) -> list[str]:
    browser.visit(f"{place}/index.html")
    browser.ask("document.querySelector('.md-search__button').click()")
    time.sleep(1)
    browser.do("Input.insertText", text=question)
    links = "[...document.querySelectorAll('*')].flatMap(e => [...(e.shadowRoot?.querySelectorAll('a[href]') ?? [])])"
    addresses = f"{links}.map(e => e.getAttribute('href')).filter(e => e.includes('.html?h='))"
    deadline = time.monotonic() + 30
    while not (found := browser.ask(addresses)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [address.removeprefix(f"{place}/") for address in found]


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[str]:
    """Serve the site over HTTP, as its readers mostly see it."""
    handler = partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_source_files_and_folders_are_pages(site: Path) -> None:
    assert "class FedAvg" in re.sub(
        r"<[^>]+>", "", (site / "repository/custom/medsilo/methods/fedavg.py.html").read_text()
    )
    assert "config_fed_server.json" in (site / "repository/jobs/fedavg.html").read_text("utf-8")


def test_files_of_results_are_there_as_they_are(site: Path) -> None:
    name = "results/shift.csv"
    assert (site / "repository" / name).read_text("utf-8") == (ROOT / name).read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["other.md#gone", "#gone", "none.md"])
def test_a_lost_link_or_anchor_fails_the_build(tmp_path: Path, wrong: str) -> None:
    pytest.importorskip("zensical", reason="needs pyproject.toml's group docs")
    own = {key: value for key, value in settings().items() if key != "nav"}
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "other.md").write_text("# Other\n")
    for link, code in (("other.md#other", 0), (wrong, 1)):
        (pages / "index.md").write_text(f"# Home\n\n[there](other.md#other) [perhaps]({link})\n")
        done = build(own, pages, tmp_path / "out")
        assert done.returncode == code, done.stderr
    assert "does not exist" in done.stderr and (tmp_path / "out/index.html").is_file()
