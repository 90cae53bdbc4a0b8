"""Hooks of mkdocs.yml: the README is the site's first page, and whatever pages link to is on the site, too."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.links import HOME, ROOT, for_the_site, is_outward, links, place, slug, target_of

LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
_written_in: dict[str, str] = {}  # a page's place on the site: its path in the repository


def on_config(config: MkDocsConfig) -> None:
    """Make anchors as repositories' web pages do."""
    config.mdx_configs["toc"]["slugify"] = slug


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the README and every file and folder that a page links to, and that pages so added link to."""
    _written_in.clear()
    waiting = [HOME, *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    while waiting:
        path = waiting.pop()
        where = place(path)
        if where in _written_in or not (ROOT / path).exists():
            continue  # mkdocs itself names a link that is lost
        _written_in[where] = path
        if where not in files.src_uris:
            files.append(File.generated(config, where, content=_content(path)))
        if path.endswith(".md"):
            found = links((ROOT / path).read_text("utf-8"))
            waiting += [target_of(path, link)[0] for link in found if not is_outward(link)]


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page with links that hold on the site."""
    where = page.file.src_uri
    if _written_in[where].endswith(".md"):
        return for_the_site(markdown, _written_in[where])
    page.meta["search"] = {"exclude": True}  # source files
    return markdown


def _content(path: str) -> str:
    """Return a file of the repository as a page; of a folder all its files."""
    source = ROOT / path
    if path.endswith(".md"):
        return source.read_text("utf-8")
    files = sorted(source.rglob("*.*")) if source.is_dir() else [source]
    parts = [f"# `{path}`"]
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            heading = [f"## `{file.relative_to(source).as_posix()}`"] if source.is_dir() else []
            parts += [*heading, f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text('utf-8')}\n````"]
    return "\n\n".join(parts)
