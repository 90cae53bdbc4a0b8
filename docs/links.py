"""Links of the pages, which lead somewhere in the repository and on the site that `make docs` builds."""

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

ROOT = Path(__file__).resolve().parent.parent
HOME, PAGES = "README.md", "docs"  # the site's first page, and the folder of the others
OUTSIDE = "repository"  # the folder of the site for whatever else pages link to

_LINK = re.compile(r"(?P<code>^```.*?^```|``.+?``|`[^`\n]+`)|\]\((?P<target>[^)\s]+)\)", re.M | re.S)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
_NAMED = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def with_links(text: str, change: Callable[[str], str]) -> str:
    """Return a page's text with the target of every link changed; code stays as it is."""

    def changed(found: re.Match[str]) -> str:
        return found[0] if found["code"] else f"]({change(found['target'])})"

    return _LINK.sub(changed, text)


def links(text: str) -> list[str]:
    """Return the targets of a page's links."""
    return [found["target"] for found in _LINK.finditer(text) if found["target"]]


def slug(heading: str, separator: str = "-") -> str:
    """Return the anchor of a heading, as repositories' web pages make it."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", separator)


def anchors(text: str) -> set[str]:
    """Return what a link to a page may name after `#`."""
    headings = _HEADING.findall(_FENCED.sub("", text))
    return {*map(slug, headings), *_NAMED.findall(text)}


def target_of(page: str, link: str) -> tuple[str, str]:
    """Return the file that a page's link means, as a path in the repository, and the anchor; of a folder its README."""
    written, _, anchor = link.partition("#")
    path = normpath(PurePosixPath(page).parent / written) if written else page
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path, anchor


def is_outward(link: str) -> bool:
    """Return whether a link leads to another host."""
    return "://" in link or link.startswith("mailto:")


def place(path: str) -> str:
    """Return where on the site a file or folder of the repository is."""
    if path == HOME:
        return "index.md"
    if path.startswith(f"{PAGES}/"):
        return path.removeprefix(f"{PAGES}/")
    return f"{OUTSIDE}/{path}" if path.endswith((".md", ".csv")) else f"{OUTSIDE}/{path}.md"


def for_the_site(text: str, page: str) -> str:
    """Return the text of a page of the repository with links that hold on the site."""
    here = PurePosixPath(place(page)).parent

    def moved(link: str) -> str:
        if is_outward(link):
            return link
        path, anchor = target_of(page, link)
        return relpath(place(path), here) + (f"#{anchor}" if anchor else "")

    return with_links(text, moved)
