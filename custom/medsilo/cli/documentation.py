"""Search medsilo's documentation pages, and print passages in a terminal."""

import bz2
import json
import math
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Annotated

import typer

from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError
from medsilo.core.package import PLACE, ROOT, from_lab

CHECKOUT = PLACE.parent
# The compressed pages in the wheels: medsilo's pages for hospitals, and the further pages of medsilo-lab.
PAGES, LAB_PAGES = ROOT / "pages.json.bz2", ROOT / "lab_pages.json.bz2"
HELP_PAGE = "study/help"  # the first column of the tables on this page contains symptoms
REFERENCE = "reference/"
OF_ANSWERS = ("study/", "trust/officer", "trust/reliability")  # on these pages, a row of a table answers a question
MOST_FOUND = 8  # maximum number of passages in a search result
WIDEST = 88  # characters per line
IN_TITLE = 4  # weight of words in titles, relative to words in the text
BY_SYNONYM = 0.5  # weight of a synonym of a searched word, relative to the word itself
USUAL_LENGTH = 120  # typical number of words in a passage of the documentation, for BM25 ranking
_NO_WORDS = frozenset(  # frequent English words, which a search in the documentation ignores
    re.findall(
        r"\w+",
        "a an and are as at be by can do does for from has have how i if in is it its me much my no not of on or our "
        "than that the then there this to use we what when where which who why will with",
    )
)
# each text lists words that the search treats as synonyms
_SYNONYMS = (
    "pick choose chosen select",
    "algorithm method",
    "cancel stop abort",
    "laptop machine computer",
    "reject decline",
    "offline internet airgap airgapped disconnected connected",
    "crashed killed died restart reboot debug log",
    "delete remove uninstall erase wipe prune",
    "proxy firewall",
    "boots systemd",
    "stolen lost revoke",
    "withdraw leave quit decline",
    "kick ban exclude expel",
    "metrics monitor status progress",
    "figure plot graph picture draw",
    "learning training",
    "hospital client node institution site",
    "subject patient",
    "parameters gradients weights",
    "hyperparameter setting option key",
    "encrypted ssl https tls",
    "anonymise pseudonymise deidentify pseudonym",
    "phi identify personal",
    "hipaa law gdpr",
    "contract agreement ethics irb",
    "bandwidth traffic gigabytes bytes",
    "straggler slow timeout",
    "price free licence license",
    "root sudo admin account",
    "rights permission",
    "significant p-value interval",
    "excel spreadsheet csv table",
    "saved stored written",
    "sent send leave",
    "auc auroc",
    "dataloader loader",
    "reproducible deterministic repeatable identical",
    "transformer vit",
    "foundation backbone pretrained",
    "wsi pathology slide",
    "lightgbm catboost xgboost tree",
    "nlp language text",
    "mac macos apple windows linux",
    "ram memory",
    "graphics cuda gpu",
    "kubernetes podman docker container",
    "password credentials certificate",
    "poisoning byzantine malicious dishonest hostile",
    "fake simulated simulator synthetic",
    "split partition divide",
    "heterogeneous differ",
    "bug issue weakness",
    "update upgrade",
)
_FENCED = re.compile(r"^```", re.M)
_HEADING = re.compile(r"^(#{1,6}) (.+)$")
_ANCHOR = re.compile(r'<a name="([^"]+)"></a>')
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
# the beginning of a paragraph, or of an item in a list, that begins in bold
_IN_BOLD = re.compile(r"^(?=(?:[-*] |\d+\. )?\*\*([^*]+)\*\*)", re.M)
# a title in bold before the first sentence of a paragraph
_TITLE = re.compile(r"^(?:[-*] |\d+\. )?\*\*[^*]+[.?:]\*\*\s+")
# a line break within a paragraph; code, lists and tables keep their lines
_WRAPPED = re.compile(r"(?<=[^\s|])\n {0,3}(?=[^\s|#`*<\d-])")
_CODE = re.compile(r"`([^`]+)`")
_ENDINGS = re.compile(
    "(?<=...)(?:abilit(?:y|ies)|ibilit(?:y|ies)|[ai]bl[ey]|at(?:ions?|e[sd]?|ing|ors?)|ments?|ions?|ings?|acy|"
    "ie[sd]|e[rd]?s?|ally|l?y|(?<!s)s)$"
)
# Unicode characters for LaTeX commands in formulas.
_SIGNS = {
    **{"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eta": "η", "theta": "θ", "lambda": "λ", "mu": "μ"},
    **{"sigma": "σ", "tau": "τ", "varphi": "φ", "psi": "ψ", "nabla": "∇", "Delta": "Δ", "Psi": "Ψ", "sum": "Σ "},
    **{"leftarrow": "← ", "le": "≤ ", "ge": "≥ ", "approx": "≈ ", "odot": "⊙ ", "cdot": "· ", "in": "∈ ", "mid": "| "},
    **{"lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "langle": "⟨", "rangle": "⟩", "sqrt": "√"},
    **{"bar": "", "tilde": "", "quad": "   ", "left": "", "right": ""},
}


@dataclass(frozen=True)
class Passage:
    """A section of a documentation page, or a part of a section: a table row, or a paragraph that begins in bold."""

    page: str  # path of the documentation page without .md, such as study/join
    anchor: str
    title: str
    text: str  # in Markdown
    names: frozenset[str] = frozenset()  # keys, commands and page names for which `medsilo docs` finds this passage
    messages: tuple[str, ...] = ()  # error messages that the passage of the documentation explains
    is_part: bool = False

    @property
    def place(self) -> str:
        """Return the name with which `medsilo docs` prints this passage of the documentation."""
        return f"{self.page}#{self.anchor}" if self.anchor else self.page

    @cached_property
    def words(self) -> Counter[str]:
        """Count the stems in the passage; a stem in the title counts several times."""
        words = Counter(words_of(self.text))
        for word in words_of(f"{self.title} {self.page.replace('/', ' ')}"):
            words[word] += IN_TITLE
        return words

    @cached_property
    def heading(self) -> frozenset[str]:
        """The stems in the passage's own heading, without the page's title."""
        return frozenset(words_of(self.title.rpartition(": ")[2]))

    def is_about(self, message: str) -> bool:
        return any(
            re.search(".+".join(map(re.escape, re.split(r" ?(?:…|\.\.\.) ?", own.strip()))), message, re.I)
            for own in self.messages
        )


def words_of(text: str) -> Iterator[str]:
    """Yield the stems of a text's words, and of the parts of words such as training.rounds; "data set" is one word."""
    for found in re.findall(r"[\w.-]*\w", text.lower().replace("data set", "dataset")):
        for word in {found, *re.split(r"[._-]", found)} - _NO_WORDS:
            yield stem(word)


def stem(word: str) -> str:
    """Return the stem of a word: "stopped" becomes "stop", and "normalization" becomes "normalis"."""
    return re.sub(r"iz$", "is", re.sub(r"([bdgklmnprt])\1$", r"\1", _ENDINGS.sub("", word)))


def slug(heading: str) -> str:
    """Return a heading's anchor as GitHub writes it."""
    return re.sub(r"[^\w\- ]", "", _LINK.sub(r"\1", heading).replace("`", "").strip().lower()).replace(" ", "-")


def passages_of(page: str, text: str) -> Iterator[Passage]:
    """Yield a page's sections, its paragraphs that begin in bold, and the table rows that describe a key or answer a
    question.
    """
    title, heading, anchor, lines, fenced = "", "", "", list[str](), False
    for line in [*text.splitlines(), "# end"]:
        fenced ^= line.startswith("```")
        found = None if fenced else _HEADING.match(line)
        if found is None:
            lines.append(line)
            continue
        if heading:
            whole = title if heading == title else f"{title}: {heading}"
            names = {heading.removeprefix("medsilo ") if heading.startswith("medsilo ") else anchor} - {""}
            if not anchor:
                names |= {page, page.rpartition("/")[2], page.rpartition("/")[2].removesuffix("s")}
            yield Passage(page, anchor, whole, "\n".join(lines).strip(), frozenset(names))
            yield from _rows_of(page, anchor, whole, lines)
            yield from _paragraphs_of(page, anchor, whole, "\n".join(lines))
        heading, lines = _ANCHOR.sub("", found[2]), []
        title, anchor = (title, slug(heading)) if title else (heading, "")


def _rows_of(page: str, section: str, title: str, lines: Sequence[str]) -> Iterator[Passage]:
    for heads, cells in table_rows(lines):
        anchor = _ANCHOR.search(cells[0])
        codes = tuple(_CODE.findall(cells[0]))
        text = "\n".join(["| " + " | ".join(heads) + " |", "|---|", "| " + " | ".join(cells) + " |"])
        if anchor and codes:
            names = frozenset({anchor[1], codes[0], codes[0].split(".")[-1]})
            yield Passage(page, anchor[1], codes[0], text, names, is_part=True)
        elif page.startswith(OF_ANSWERS):
            explained = codes if page == HELP_PAGE else ()
            messages = tuple(code for code in explained if not code.islower() or " " in code)  # no names of commands
            yield Passage(page, section, title, text, messages=messages, is_part=True)


def _paragraphs_of(page: str, anchor: str, title: str, text: str) -> Iterator[Passage]:
    _, *parts = _IN_BOLD.split(text)
    for bold, paragraph in zip(parts[::2], parts[1::2], strict=True):
        about = " ".join(bold.split()).rstrip(".:")
        yield Passage(page, anchor, f"{title}: {about}", paragraph.strip(), is_part=True)


def table_rows(lines: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    heads: list[str] = []
    for line in lines:
        if not line.startswith("|"):
            heads = []
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
        if not heads:
            heads = cells
        elif set(line) - {*"|-: "}:
            yield heads, cells


@cache
def pages() -> dict[str, str]:
    """Return the text of each documentation page by its name, such as study/join."""
    found = dict[str, str]()
    for file in filter(Path.is_file, (PAGES, LAB_PAGES)):
        found |= json.loads(bz2.decompress(file.read_bytes()))
    found = found or pages_of(CHECKOUT)
    if not found:
        raise MedsiloError("the documentation is not in this installation; install medsilo again")
    return dict(sorted(found.items()))


def pages_of(checkout: Path) -> dict[str, str]:
    """Return the pages in a source checkout (docs/ and the README about kits), without comments and pictures."""
    docs, kits = checkout / "docs", checkout / "provisioning/README.md"
    files = {path.relative_to(docs).with_suffix("").as_posix(): path for path in docs.rglob("*.md")}
    if files and kits.is_file():
        files["provisioning"] = kits
    hidden = re.compile(r"<!--.*?-->|<picture>.*?</picture>|^!\[.*?\)$", re.S | re.M)
    return {page: unwrapped(hidden.sub("", files[page].read_text("utf-8"))) for page in sorted(files)}


def unwrapped(text: str) -> str:
    """Join the lines of each paragraph, because pages then compress better."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    parts[::2] = (_WRAPPED.sub(" ", part) for part in parts[::2])
    return "".join(parts)


def all_passages() -> list[Passage]:
    return [one for page, text in pages().items() for one in passages_of(page, text)]


def named(passages: Sequence[Passage], wanted: str) -> list[Passage]:
    """Return the documentation passages with a given name, such as the name of a page, a heading, a command or a
    key.
    """
    place = re.sub(r"\.md(?=#|$)", "", wanted.removeprefix("docs/"))
    if by_place := [passage for passage in passages if passage.place == place]:
        return by_place[:1]
    name = wanted.removeprefix("medsilo ").strip()
    found = [one for one in passages if name in one.names or name.replace(" ", "-") in one.names]
    return sorted(found, key=lambda one: (not one.title.endswith(f": medsilo {name}"), bool(one.anchor), one.page))


@cache
def _synonyms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for group in _SYNONYMS:
        words = {*words_of(group)}
        for word in words:
            found.setdefault(word, set()).update(words)
    return found


def search(passages: Sequence[Passage], wanted: str) -> list[Passage]:
    """Return the passages that match the searched words or their synonyms best, at most one for each anchor.

    A passage's rank is the product of its BM25 score, its coverage of the searched words, and its heading's agreement
    with these words. The coverage is the square root of the share of words that the passage contains, weighted by their
    rarity.
    """
    words = {*words_of(wanted)}
    weights = {word: dict.fromkeys(_synonyms().get(word, ()), BY_SYNONYM) | {word: 1.0} for word in words}
    searched = {*chain(*weights.values())}
    known = Counter(word for one in passages for word in searched & one.words.keys())
    rarity = {word: math.log(1 + len(passages) / count) for word, count in known.items()}
    most = {
        word: max((rarity.get(each, 0) * by for each, by in same.items()), default=0) for word, same in weights.items()
    }

    def score(passage: Passage) -> float:
        longer = 0.4 + 0.6 * passage.words.total() / USUAL_LENGTH
        fits = {
            word: max(
                by * rarity.get(each, 0) * passage.words[each] / (passage.words[each] + longer)
                for each, by in same.items()
            )
            for word, same in weights.items()
        }
        covered = sum(most[word] for word, fit in fits.items() if fit)
        if not covered:
            return 0
        agreement = 1 + 2 * len(passage.heading & words) / (len(passage.heading) + len(words))
        in_reference = 0.65 if passage.page.startswith(REFERENCE) else 1
        return sum(fits.values()) * math.sqrt(covered / sum(most.values())) * agreement * in_reference

    scores = {one: fit for one in passages if (fit := score(one))}
    best: dict[str, Passage] = {}
    for one in sorted(scores, key=lambda one: -scores[one]):
        first = best.setdefault(one.place, one)
        if one.is_part and first.text.startswith("**") and not first.is_part:
            # a section of questions and answers begins with another question, so show the matching one
            best[one.place] = one
    return list(best.values())[:MOST_FOUND]


# ---------------------------------------------------------------------------------------------------- for a terminal
def shown(passage: Passage, width: int) -> str:
    """Format a passage for a terminal: tables become lists, and links become page names for `medsilo docs`."""
    parts = []
    language = "text"
    for number, part in enumerate(re.split(r"^```(.*)(?:\n|\Z)", passage.text, flags=re.M)):
        if number % 2:
            language = part
            continue
        if number % 4:
            code = in_signs(part) if language == "math" else part.rstrip()
            parts.append(textwrap.indent(code, "    "))
            continue
        for block in re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", part.strip("\n")):
            lines = block.splitlines()
            if lines and lines[0].startswith("|"):
                parts += [_entry(heads, cells, passage.page, width) for heads, cells in table_rows(lines)]
            elif lines and lines[0].startswith("    "):
                parts.append(block)
            elif block.strip():
                inner = "  " if re.match(r"[-*] |\d+\. ", block) else ""
                parts.append(textwrap.fill(plain_words(block, passage.page), width, subsequent_indent=inner))
    return "\n\n".join([passage.title, *parts])


def _entry(heads: Sequence[str], cells: Sequence[str], page: str, width: int) -> str:
    first, *others = (plain_words(cell, page) for cell in cells)
    lines = [first]
    for head, cell in zip(heads[1:], others, strict=False):
        if cell:
            head = f"{plain_words(head, page)}: " if len(heads) > 2 else ""
            lines.append(textwrap.fill(head + cell, width, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def plain_words(markdown: str, page: str) -> str:
    def led(match: re.Match[str]) -> str:
        path, _, anchor = match[2].partition("#")
        target = normpath(PurePosixPath(page).parent / path) if path else page
        target = target.removesuffix(".md")
        if path and target not in pages():
            return match[1]
        return f"{match[1]} [{target}{'#' if anchor else ''}{anchor}]"

    text = re.sub(r"\$+`?([^$]+?)`?\$+", lambda found: in_signs(found[1]), markdown)
    text = _LINK.sub(led, _ANCHOR.sub("", text))
    return " ".join(re.sub(r"\*\*|`|</?(?:br|sub|sup)>", "", text).split())


def in_signs(formula: str) -> str:
    """Convert a LaTeX formula to a line of Unicode text, as far as possible."""
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", formula)
    text = re.sub(r"\\(?:text|mathrm|operatorname|mathcal)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\([a-zA-Z]+) ?", lambda found: _SIGNS.get(found[1], found[1]), text)
    return " ".join(re.sub(r"[{}]|\\[,;!]?", "", text).split())


def _first_sentence(passage: Passage) -> str:
    if passage.text.startswith("|"):
        [(_, cells), *_] = table_rows(passage.text.splitlines())
        shown = cells[-2:] if _ANCHOR.search(cells[0]) else cells
        return plain_words(" — ".join(filter(None, shown)), passage.page)
    text = re.sub(r"^For: .*?$|^```.*?^```|^\|.*?$", "", passage.text, flags=re.M | re.S).strip()
    if passage.is_part:
        text = _TITLE.sub("", text)
    return plain_words(text.partition("\n\n")[0], passage.page)


def docs(
    screen: Console,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORDS",
            help="words to search for: a key, command, page, message or anything else (default: list all pages)",
        ),
    ] = None,
) -> int | None:
    """Search the documentation for a key, a command, a message or any words.

    The command works offline, because the pages are installed with medsilo. A name in brackets is another page:
    'medsilo docs NAME' shows it.
    """
    width = min(WIDEST, shutil.get_terminal_size().columns)
    passages, wanted = all_passages(), " ".join(words or ()).strip()
    absent = from_lab("those for leads and researchers")
    if not wanted:
        pages = [passage for passage in passages if not passage.anchor and not passage.is_part]
        screen.say(*(f"{page.page:34} {page.title}" for page in pages), "", f"medsilo docs PAGE prints one{absent}.")
        screen.answer(pages=[{"place": one.place, "title": one.title} for one in pages])
        return None
    exact = named(passages, wanted) or [one for one in passages if one.is_about(wanted)]
    if exact:
        first, *others = exact
        sections = (one for one in passages if one.page == first.page and one.anchor and not one.is_part)
        whole = [first, *(section for section in sections if section.title.startswith(f"{first.title}: "))]
        chosen = [first] if first.anchor else list(dict.fromkeys(whole))
        screen.say("\n\n".join(shown(one, width) for one in chosen), "", f"From {first.place}")
        if others:
            screen.say("See also: " + ", ".join(dict.fromkeys(f"medsilo docs {other.place}" for other in others)))
        screen.answer(found=[{"place": one.place, "title": one.title, "text": shown(one, width)} for one in exact])
        return None
    found = search(passages, wanted)
    if not found:
        raise MedsiloError(f"no page says anything about {wanted!r}; 'medsilo docs' lists the pages{absent}")
    for one in found:
        about = textwrap.shorten(_first_sentence(one), 2 * width - 8, placeholder=" ...")
        about = textwrap.fill(about, width, initial_indent="    ", subsequent_indent="    ")
        screen.say(f"medsilo docs {one.place}", f"    {one.title}", *([about] if about.strip() else []))
    if absent:
        screen.say("", f"These pages are for hospitals{absent}.")
    screen.answer(found=[{"place": one.place, "title": one.title} for one in found])
    return None
