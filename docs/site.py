"""The pages as a site: `make docs` builds site/ with Zensical, offline; its pages load nothing from other hosts.

    python -m docs.site [FOLDER]

The README is the first page. Whatever pages link to is on the site, too: source files as pages, and files of results as
they are. Links lead to their places there, and the tables of the reference pages are filled. A link or an anchor that
leads nowhere fails the build.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from docs.links import HOME, PAGES, ROOT, for_the_site, is_outward, links, place, target_of
from docs.tables import renewed

SETTINGS = ROOT / "mkdocs.yml"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"  # source files
AS_THEY_ARE = (".css", ".png", ".svg", ".ipynb")  # of the folder of pages
SLUGS = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"  # anchors as on repositories' web pages


def write_pages(folder: Path) -> None:
    """Write what the site is made of: every page, and whatever pages link to."""
    for path in (ROOT / PAGES).rglob("*"):
        if path.suffix in AS_THEY_ARE:
            target = folder / path.relative_to(ROOT / PAGES)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    waiting = [HOME, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / PAGES).rglob("*.md")))]
    written: set[str] = set()
    while waiting:
        path = waiting.pop()
        target = folder / place(path)
        if path in written or target.exists() or not (ROOT / path).exists():
            continue  # Zensical itself names a link that is lost
        written.add(path)
        text = _content(path)
        if path.endswith(".md"):
            waiting += [target_of(path, link)[0] for link in links(text) if not is_outward(link)]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(for_the_site(text, path) if path.endswith(".md") else text, "utf-8")


def _content(path: str) -> str:
    """Return a page with its tables, or a source file of the repository as a page; of a folder all its files."""
    source = ROOT / path
    if path.endswith(".md"):
        return renewed(source.read_text("utf-8"))
    if path.endswith(".csv"):
        return source.read_text("utf-8")
    files = sorted(source.rglob("*.*")) if source.is_dir() else [source]
    parts = [f"{UNSEARCHED}# `{path}`"]
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            heading = [f"## `{file.relative_to(source).as_posix()}`"] if source.is_dir() else []
            parts += [*heading, f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text('utf-8')}\n````"]
    return "\n\n".join(parts)


def build(settings: dict[str, Any], pages: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build a folder of pages, with links and anchors checked; these settings name neither folder."""
    config = pages.parent / "mkdocs.yml"
    text = yaml.safe_dump({**settings, "docs_dir": pages.name, "site_dir": "site"}, sort_keys=False, allow_unicode=True)
    config.write_text(text.replace("slugify: repository", f"slugify: {SLUGS}"), "utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", str(config)]
    done = subprocess.run(command, cwd=pages.parent, capture_output=True, text=True)
    if done.returncode == 0:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(pages.parent / "site", out)
    return done


def main() -> int:
    """Build the site."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")
    with TemporaryDirectory(prefix="medsilo-") as folder:
        pages = Path(folder) / "pages"
        write_pages(pages)
        done = build(yaml.safe_load(SETTINGS.read_text("utf-8")), pages, out)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
