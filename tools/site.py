"""Build the documentation site with Zensical, without a network: `make docs` writes site/.

    python -m tools.site [FOLDER]

The site includes all files to which pages link: a source file becomes a page, and a result file is copied. A broken
link or anchor makes the build fail. Formulas become MathML, and pictures have a light and a dark version.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from latex2mathml.converter import convert

from tools.links import PAGES, ROOT, for_the_site, is_outward, links, place, target_of

SETTINGS = ROOT / "mkdocs.yml"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"  # excludes source files from the search
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+?)(\.svg|\.png)\)")
_FORMULA = re.compile(r"^```math\n(.*?)\n```$", re.M | re.S)
AS_THEY_ARE = (".css", ".js", ".png", ".svg", ".ipynb")  # file types that are copied unchanged
# makes anchors in the same way as GitHub
SLUGS = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"


def write_pages(folder: Path) -> None:
    """Write the files from which the site is built: all pages, and all files to which pages link."""
    for path in (ROOT / PAGES).rglob("*"):
        if path.suffix in AS_THEY_ARE:
            copy(path, folder / path.relative_to(ROOT / PAGES))
    waiting = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / PAGES).rglob("*.md"))]
    written: set[str] = set()
    while waiting:
        path = waiting.pop()
        target = folder / place(path)
        if path in written or target.exists() or not (ROOT / path).exists():
            continue
        written.add(path)
        if target.suffix in AS_THEY_ARE:
            copy(ROOT / path, target)
            continue
        text = _content(path)
        if path.endswith(".md"):
            waiting += [target_of(path, link)[0] for link in links(text) if not is_outward(link)]
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".md"):
            text = with_formulas(with_pictures(for_the_site(text, path)))
        target.write_text(text, "utf-8")


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    if source.suffix == ".svg":
        write_schemes(source, target)


def write_schemes(picture: Path, target: Path) -> None:
    text = picture.read_text("utf-8")
    for scheme, medium in (("light", "not all"), ("dark", "all")):
        new = text.replace("@media (prefers-color-scheme: dark)", f"@media {medium}")
        target.with_stem(f"{target.stem}-{scheme}").write_text(new, "utf-8")


def with_pictures(text: str) -> str:
    """Return a page that has each picture in a light and in a dark version, of which the theme shows one."""

    def both(found: re.Match[str]) -> str:
        words, stem, ending = found.groups()
        dark = ROOT / PAGES / "pictures" / f"{PurePosixPath(stem).name}-dark{ending}"
        light = f"{stem}-light" if ending == ".svg" else stem
        if ending == ".svg" or dark.is_file():
            return f"![{words}]({light}{ending}#only-light)![{words}]({stem}-dark{ending}#only-dark)"
        return found[0]

    return _PICTURE.sub(both, text)


def with_formulas(text: str) -> str:
    """Return a page in which each formula is MathML, which browsers show without scripts."""
    return _FORMULA.sub(lambda found: f'<div class="formula">{convert(found[1], display="block")}</div>', text)


def _content(path: str) -> str:
    """Return the Markdown of a page. For a source file or a folder, return a page that shows the file, or all files in
    the folder.
    """
    source = ROOT / path
    if path.endswith((".md", ".csv")):
        return source.read_text("utf-8")
    files = sorted(source.rglob("*.*")) if source.is_dir() else [source]
    parts = [f"{UNSEARCHED}# `{path}`"]
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            heading = [f"## `{file.relative_to(source).as_posix()}`"] if source.is_dir() else []
            parts += [*heading, f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text('utf-8')}\n````"]
    return "\n\n".join(parts)


def build(settings: dict[str, Any], pages: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the site from a folder of pages, and check the site's links and anchors."""
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
