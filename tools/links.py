"""Check the links of the documentation, and rewrite them for the documentation site that `make docs` builds."""

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

ROOT = Path(__file__).resolve().parent.parent
PAGES = "docs"
OUTSIDE = "repository"  # folder on the documentation site for files outside of docs/ to which pages link

_LINK = re.compile(r"(?P<code>^```.*?^```|``.+?``|`[^`\n]+`)|\]\((?P<target>[^)\s]+)\)", re.M | re.S)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
_NAMED = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def with_links(text: str, change: Callable[[str], str]) -> str:
    """Return the text of a page with changed link targets; `change` maps an old target to a new target."""

    def changed(found: re.Match[str]) -> str:
        return found[0] if found["code"] else f"]({change(found['target'])})"

    return _LINK.sub(changed, text)


def links(text: str) -> list[str]:
    return [found["target"] for found in _LINK.finditer(text) if found["target"]]


def slug(heading: str, separator: str = "-") -> str:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", separator)


def anchors(text: str) -> set[str]:
    headings = _HEADING.findall(_FENCED.sub("", text))
    return {*map(slug, headings), *_NAMED.findall(text)}


def target_of(page: str, link: str) -> tuple[str, str]:
    """Return the file and the anchor to which a link on a page leads.

    The file is a path in the repository; if the link leads to a folder, the file is the folder's README.
    """
    written, _, anchor = link.partition("#")
    path = normpath(PurePosixPath(page).parent / written) if written else page
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path, anchor


def is_outward(link: str) -> bool:
    return "://" in link or link.startswith("mailto:")


def place(path: str) -> str:
    """Return the path that a file or folder of the repository has on the documentation site."""
    if path == "README.md":  # the documentation site has a separate first page
        return "index.md"
    if path.startswith(f"{PAGES}/"):
        return path.removeprefix(f"{PAGES}/")
    shown = path.removeprefix(".")  # the site's generator ignores hidden folders, such as .github
    return f"{OUTSIDE}/{shown}" if path.endswith((".md", ".csv", ".png", ".svg")) else f"{OUTSIDE}/{shown}.md"


def for_the_site(text: str, page: str) -> str:
    here = PurePosixPath(place(page)).parent

    def moved(link: str) -> str:
        if is_outward(link):
            return link
        path, anchor = target_of(page, link)
        return relpath(place(path), here) + (f"#{anchor}" if anchor else "")

    return with_links(text, moved)
