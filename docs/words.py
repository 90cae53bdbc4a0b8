"""The words of pages, help texts, messages and templates: sentences that are too long, and words that say too little.

    python -m docs.words --seed 7      # draw 100 sentences to read aloud, then list what is wrong, counted by kind
    make words SEED=7

A test holds the counts at `MOST`: no page has such a sentence. `FORBIDDEN` has the words to use instead.
"""

import argparse
import ast
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 25  # words of one sentence
SHORTEST = 5  # words of a sentence that is drawn: numbers in tables are none
# Sentences that are wrong, by kind of text: at most so many. Lower these numbers as texts get better.
MOST: Mapping[str, int] = {"page": 0, "help": 0, "message": 0, "template": 0}

# The pages in docs/, and the words of them and of OUTSIDE together, without tables that a program makes: at most
# so many.
OUTSIDE = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "provisioning/README.md")
MOST_PAGES, MOST_WORDS = 27, 40_500

# What a sentence may not have (in any letters' case), and what to write. Code between backticks is not looked at.
FORBIDDEN: Mapping[str, str] = {
    r"(gone|written|new|wanted|shown|listed) (is|are) ": "subject first: Removed: ..., medsilo writes ...",
    r"of (tables|images|survival) the ": "subject first",
    r"surely|sure\b": "significant, or the interval",
    r"joining pays|joining helps": "federated training helps",
    r"promising|worth it\b|no gain": "better, worse or inconclusive, with n and the interval",
    r"told|tells": "reports, discloses, sends, says",
    r"withh(eld|old\w*)": "suppressed",
    r"leak reports?": "disclosure report",
    r"seal(s|ed|ing)?": "secure aggregation, masked",
    r"(is|are|was|were|be|been) refused(?! by)": "say who rejects: The server rejects ...",
    r"stands? out|stood out": "outlier",
    r"drawn (hospitals?|sites?|data)|hospitals? that (is|are) drawn|made-up": "synthetic",
    r"(still )?rising": "not converged",
    r"hardly learn(s|ed)?": "has not learned",
    r"answers? together": "ensemble",
    r"rooms\b": "package",
    r"unseen (sites?|hospitals?)": "evaluation sites",
    r"is known to ±": "the 95 % margin is ± ...",
    r"who (is|are) asked|whom it is|who answers now": "a noun",
    r"what is (told|asked|looked at|kept)": "a noun",
    r"folder that is written|file that is written": "output folder",
    r"key that is no|is no (text|number|parcel|command)": "must be a string, must be ...",
    r"with (\w+ )?times the work": "a table of evidence",
    r"busy machine|two cores|otherwise idle": "a table of evidence",
    r"tests/\w+|test_\w+": "a table of evidence",
}
_FORBIDDEN = {re.compile(rf"\b(?:{words})", re.I): better for words, better in FORBIDDEN.items()}
_ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|al|Art|vs|No|approx|cf|Fig|Eq|resp)\.$")
_ENDS = re.compile(r"(?<=[.!?])[)\"'”*_]*\s+(?=[^a-z\s]|medsilo\b)")
_WRITTEN = re.compile(r"<!-- (?:table|rooms|seats)\b.*?<!-- end(?: of (?:rooms|seats))? -->", re.S)  # by a command
_KINDS = ("page", "help", "message", "template")


@dataclass(frozen=True)
class Sentence:
    """A sentence that a reader meets: its kind of text, its file and its words."""

    kind: str
    file: str
    text: str

    @property
    def wrong(self) -> tuple[str, ...]:
        """Return what is wrong with it."""
        number = len(self.text.split())
        long = (f"{number} words",) if number > LONGEST else ()
        return (*long, *(f'"{found[0].strip()}": {better}' for found, better in self.forbidden()))

    def forbidden(self) -> Iterator[tuple[re.Match[str], str]]:
        """Yield the forbidden words with better ones."""
        plain = self.text.replace("CODE", "")
        return ((found, better) for words, better in _FORBIDDEN.items() if (found := words.search(plain)))


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a paragraph."""
    waiting = ""
    for part in _ENDS.split(" ".join(text.split())):
        waiting = f"{waiting} {part}".strip()
        if not _ABBREVIATED.search(waiting):
            yield waiting
            waiting = ""
    if waiting:
        yield waiting


def blocks(markdown: str) -> Iterator[str]:
    """Yield the headings, paragraphs, items and cells of a page as plain text; a piece of code is one word."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|^(?: {4}|\t).*?$", "", markdown, flags=re.M | re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    text = re.sub(r"``.+?``|`[^`]+`", "CODE", text).replace("**", "").replace("\\|", "/")
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\. ))", text):
        line = part.strip()
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split("|") if re.search(r"\w", cell))
        elif re.search(r"\w", line):
            yield re.sub(r"^(?:[-*]|#+|\d+\.)\s+", "", line)


def pages() -> Iterator[Sentence]:
    """Yield the sentences of all pages; those of tables that a command writes belong to the code."""
    folders = ("docs", "jobs", "provisioning", "site_configs", "examples")
    for path in sorted([*ROOT.glob("*.md"), *(page for name in folders for page in ROOT.glob(f"{name}/**/*.md"))]):
        written = _WRITTEN.sub("", path.read_text("utf-8"))
        for block in blocks(written):
            for text in sentences_of(block):
                yield Sentence("page", path.relative_to(ROOT).as_posix(), text)


def helps() -> Iterator[Sentence]:
    """Yield the sentences of all commands' help."""
    from medsilo.cli import _program

    waiting: list[tuple[str, Any]] = [("medsilo", _program())]
    while waiting:
        name, command = waiting.pop()
        waiting += [(f"{name} {below}", one) for below, one in getattr(command, "commands", {}).items()]
        texts = [command.help, *(getattr(one, "help", None) for one in command.params)]
        for part in (part for text in filter(None, texts) for part in re.split(r"\n\s*\n", text)):
            yield from (Sentence("help", name, text) for text in sentences_of(part))


def messages() -> Iterator[Sentence]:
    """Yield the sentences of all errors that the packages raise; what a message fills in is one word."""
    for path in sorted(ROOT.glob("custom/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Error", "Refused")):
                for text in (text for argument in node.args for text in sentences_of(_said(argument))):
                    if " " in text:
                        yield Sentence("message", path.relative_to(ROOT).as_posix(), text)


def _said(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_said(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return f"{_said(node.left)}{_said(node.right)}" if isinstance(node, ast.BinOp) else ""


def templates() -> Iterator[Sentence]:
    """Yield the sentences of the pages that medsilo writes; what a template fills in is one word."""
    for path in sorted(ROOT.glob("custom/**/*.html")):
        text = re.sub(r"{#.*?#}|<(script|style)\b.*?</\1>", "", path.read_text("utf-8"), flags=re.S)
        text = re.sub(r"{%.*?%}|<(?!/?(?:b|i|em|code|a|span|abbr)\b)[^>]*>", "\n\n", text, flags=re.S)
        text = unescape(re.sub(r"<[^>]*>", "", re.sub(r"{{.*?}}", "X", text, flags=re.S)))
        for part in re.split(r"\n\s*\n", text):
            for one in sentences_of(part):
                if len(one.split()) > 1:
                    yield Sentence("template", path.relative_to(ROOT).as_posix(), one)


def everything() -> list[Sentence]:
    """Return all sentences."""
    return [*pages(), *helps(), *messages(), *templates()]


def counted(found: list[Sentence]) -> dict[str, int]:
    """Return how many sentences are wrong, by kind."""
    bad = Counter(one.kind for one in found if one.wrong)
    return {kind: bad[kind] for kind in _KINDS}


def main() -> int:
    """Draw sentences, then say what is wrong; returns 1 when that is more than the gate allows."""
    parser = argparse.ArgumentParser(prog="python -m docs.words", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other sentences")
    parser.add_argument("-n", type=int, default=100, help="number of sentences to draw")
    parser.add_argument("--of", default="", help="only files with this in their path")
    asked = parser.parse_args()
    found = [one for one in everything() if asked.of in one.file]
    whole = [one for one in found if len(one.text.split()) >= SHORTEST]
    for one in random.Random(asked.seed).sample(whole, min(asked.n, len(whole))):
        print(f"{one.file}: {one.text}")
    print("\nWrong:")
    for one in (one for one in found if one.wrong):
        print(f"{one.file}: {'; '.join(one.wrong)}: {one.text}")
    counts = counted(found)
    print(f"\n{len(found)} sentences; wrong, by kind: {counts}; at most: {dict(MOST)}")
    return int(any(counts[kind] > MOST[kind] for kind in MOST))


if __name__ == "__main__":
    raise SystemExit(main())
