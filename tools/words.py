"""Find sentences that are too long or vague, in every text that a user or contributor reads.

    python -m tools.words --draw 100 --seed 7      # draw 100 sentences to read aloud, then list the faulty ones
    make words SEED=7

The program reads pages, help, messages, templates, docstrings, comments and descriptions of keys. Comments in YAML and
TOML files, headers of CSV files, and words in pictures are also checked. A test compares the numbers of faulty
sentences with `MOST`. `FORBIDDEN` and `VAGUE` propose better words.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 25  # maximum number of words in a sentence
# minimum number of words in a sentence that is drawn, because shorter texts are mostly names and numbers in tables
SHORTEST = 5
# Limits on the number of faulty sentences, by kind of text. If the number of faulty sentences falls, lower the limit.
MOST: Mapping[str, int] = {
    "page": 0,
    "help": 0,
    "message": 0,
    "template": 0,
    "docstring": 0,
    "comment": 0,
    "key": 0,
    "yaml": 7,
    "csv": 0,
    "picture": 0,
}

# Patterns that no sentence may contain, each with better words. Text between backticks is not checked.
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
# Patterns that docstrings, comments and descriptions of keys may not contain, each with better words.
VAGUE: Mapping[str, str] = {
    r"^what\b": "the noun itself",
    r"(returns?|yields?|says?|writes?|prints?) (what|how|whether|who|whom|whose|where|why|which)\b": "the noun itself",
    r"(of|for|with|by|to|from|in|on|and|or|as|than|has|have|into|at|is|are|that) what\b": "the noun itself",
    r"for whom it is|(is|are) for whom": "the reader's name",
    r"of (its|their|his|our) own": "drop it, or name the owner",
    r"(with|of|has|have|is|are|as|by) nothing": "a plain negation",
    r"one of (a|an|its|their|another)\b": "the noun itself",
    r"(first|last|second|next|new|old|other|another|own|right|wrong|same) one\b|\bones\b": "the noun",
    r"(such|that) one\b(?! [a-z]+(?:[^a-z]| [a-z]))|one's\b": "the noun",
    r"told|tells?\b": "reports, discloses, sends, says",
    r"seal(s|ed|ing)?\b": "secure aggregation, masked",
    r"\w+ \w+ (is|are) none\b": "a plain negation",
}
_VAGUE = {re.compile(rf"\b(?:{words})", re.I): better for words, better in VAGUE.items()}
_FORBIDDEN = {re.compile(rf"\b(?:{words})", re.I): better for words, better in FORBIDDEN.items()}
_ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|al|Art|vs|No|approx|cf|Fig|Eq|resp)\.$")
_ENDS = re.compile(r"(?<=[.!?])[)\"'”*_]*\s+(?=[^a-z\s]|medsilo\b)")
_WRITTEN = re.compile(r"<!-- rooms\b.*?<!-- end of rooms -->", re.S)
_IN_CODE = ("docstring", "comment", "key", "yaml", "csv", "picture")


@dataclass(frozen=True)
class Sentence:
    kind: str
    file: str
    text: str

    @property
    def wrong(self) -> tuple[str, ...]:
        """Return the faults of the sentence, each with a proposal for better words."""
        text = re.sub(r"(?:CODE\W*)+", "CODE ", self.text)  # counts a list of values in backticks as one word
        number = sum(bool(re.search(r"[^\W\d_]", word)) for word in text.split())
        long = (f"{number} words",) if number > LONGEST else ()
        return (*long, *(f'"{found[0].strip()}": {better}' for found, better in self.forbidden()))

    def forbidden(self) -> Iterator[tuple[re.Match[str], str]]:
        plain = self.text.replace("CODE", "")
        rules = _VAGUE if self.kind in _IN_CODE else _FORBIDDEN
        return ((found, better) for words, better in rules.items() if (found := words.search(plain)))


def sentences_of(text: str) -> Iterator[str]:
    waiting = ""
    for part in _ENDS.split(" ".join(text.split())):
        waiting = f"{waiting} {part}".strip()
        if not _ABBREVIATED.search(waiting):
            yield waiting
            waiting = ""
    if waiting:
        yield waiting


def blocks(markdown: str) -> Iterator[str]:
    """Yield the headings, paragraphs, list items and table cells of a page as plain text, with each inline code as one
    word.
    """
    text = re.sub(r"^```.*?^```|<!--.*?-->|^(?: {4}|\t).*?$", "", markdown, flags=re.M | re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|</?(?:a|picture|source|img)\b[^>]*>", "", text)
    text = re.sub(r"^\$\$.*?^\$\$|\$`[^`]+`\$|\$[^$\n]+\$", "CODE", text, flags=re.M | re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    text = re.sub(r"``.+?``|`[^`]+`", "CODE", text).replace("**", "").replace("\\|", "/")
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\. ))", text):
        line = part.strip()
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split("|") if re.search(r"\w", cell))
        elif re.search(r"\w", line):
            yield re.sub(r"^(?:[-*]|#+|\d+\.)\s+", "", line)


def pages() -> Iterator[Sentence]:
    folders = ("docs", "jobs", "provisioning", "site_configs", "examples")
    for path in sorted([*ROOT.glob("*.md"), *(page for name in folders for page in ROOT.glob(f"{name}/**/*.md"))]):
        written = _WRITTEN.sub("", path.read_text("utf-8"))
        for block in blocks(written):
            for text in sentences_of(block):
                yield Sentence("page", path.relative_to(ROOT).as_posix(), text)


def helps() -> Iterator[Sentence]:
    from medsilo.cli import _program

    waiting: list[tuple[str, Any]] = [("medsilo", _program())]
    while waiting:
        name, command = waiting.pop()
        waiting += [(f"{name} {below}", one) for below, one in getattr(command, "commands", {}).items()]
        texts = [command.help, *(getattr(one, "help", None) for one in command.params)]
        for part in (part for text in filter(None, texts) for part in re.split(r"\n\s*\n", text)):
            yield from (Sentence("help", name, text) for text in sentences_of(part))


def messages() -> Iterator[Sentence]:
    """Yield the sentences in the messages of all errors that the packages raise; each variable value counts as one
    word.
    """
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
    for path in sorted(ROOT.glob("custom/**/*.html")):
        text = re.sub(r"{#.*?#}|<(script|style)\b.*?</\1>", "", path.read_text("utf-8"), flags=re.S)
        text = re.sub(r"{%.*?%}|<(?!/?(?:b|i|em|code|a|span|abbr)\b)[^>]*>", "\n\n", text, flags=re.S)
        text = unescape(re.sub(r"<[^>]*>", "", re.sub(r"{{.*?}}", "X", text, flags=re.S)))
        for part in re.split(r"\n\s*\n", text):
            for one in sentences_of(part):
                if len(one.split()) > 1:
                    yield Sentence("template", path.relative_to(ROOT).as_posix(), one)


def python_texts() -> Iterator[Sentence]:
    for path in _tracked("*.py"):
        yield from of_code(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))


def of_code(name: str, code: str) -> Iterator[Sentence]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (Sentence("docstring", name, text) for text in _paragraphs(ast.get_docstring(node) or ""))
        if isinstance(node, ast.keyword) and node.arg in {"description", "help"}:
            yield from (Sentence("key", name, text) for text in _paragraphs(_said(node.value)))
    yield from (Sentence("comment", name, text) for text in _comments(code))


def _comments(code: str) -> Iterator[str]:
    lines: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.COMMENT or re.match(r"#!|# (?:type:|noqa|ruff:|fmt:|pragma)", token.string):
            continue
        beside = bool(token.line[: token.start[1]].strip())  # True if there is code on the line of the comment
        if beside or token.start[0] != last + 1:
            yield from _paragraphs("\n".join(lines))
            lines = []
        last = -1 if beside else token.start[0]
        lines.append(re.sub(r"^#\s?|-{5,}", "", token.string))
    yield from _paragraphs("\n".join(lines))


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring or comment, without formulas, examples and argument headings."""
    plain = re.sub(r"^(?: {4}|>>>|\.\.\. ).*?$", "", text, flags=re.M)
    plain = re.sub(r"``?[^`]+`?`", "CODE", plain)
    for part in re.split(r"\n\s*\n|\n(?=\s*[-*] )", plain):
        yield from (sentence for sentence in sentences_of(part) if re.search(r"[^\W\d_]{2}", sentence))


def settings_texts() -> Iterator[Sentence]:
    for path in (*_tracked("*.yaml"), *_tracked("*.yml"), *_tracked("*.toml")):
        yield from of_settings(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    for path in _tracked("*.csv"):
        header = path.read_text("utf-8").partition("\n")[0]
        name = path.relative_to(ROOT).as_posix()
        yield from (Sentence("csv", name, text) for text in header.split(",") if " " in text)


def of_settings(name: str, content: str) -> Iterator[Sentence]:
    """Yield the sentences in the comments of a YAML or TOML file. A comment in the same line as a value is a separate
    text.
    """
    found = (re.search(r"(^|\S?)\s*#(?=\s)(.*)$", line) for line in content.splitlines())
    comment = "\n".join((f"\n{line[2]}\n" if line[1] else line[2].strip()) if line else "" for line in found)
    yield from (Sentence("yaml", name, text) for text in _paragraphs(comment))


def pictures() -> Iterator[Sentence]:
    for path in _tracked("*.svg"):
        for text in re.findall(r"<(?:text|title|desc|tspan)\b[^>]*>([^<]+)<", path.read_text("utf-8")):
            name = path.relative_to(ROOT).as_posix()
            yield from (Sentence("picture", name, words) for words in sentences_of(unescape(text)) if " " in words)
    for path in _tracked("*.md"):
        for text in re.findall(r"!\[([^\]]+)\]", path.read_text("utf-8")):
            yield from (Sentence("picture", path.relative_to(ROOT).as_posix(), one) for one in sentences_of(text))


def _tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if not name.startswith("tests/artefacts/")]


def everything() -> list[Sentence]:
    """Return all sentences; repetitions within a file are left out."""
    kinds = (pages, helps, messages, templates, python_texts, settings_texts, pictures)
    return list(dict.fromkeys(one for kind in kinds for one in kind()))


def counted(found: list[Sentence]) -> dict[str, int]:
    bad = Counter(one.kind for one in found if one.wrong)
    return {kind: bad[kind] for kind in MOST}


def main() -> int:
    """Print some sentences at random, then all faulty sentences; return 1 if there are more faulty sentences than MOST
    allows.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.words", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the random sentences")
    parser.add_argument("--draw", type=int, default=100, help="number of sentences to draw")
    parser.add_argument("--of", default="", help="only files whose path contains this text")
    asked = parser.parse_args()
    found = [one for one in everything() if asked.of in one.file]
    whole = [one for one in found if len(one.text.split()) >= SHORTEST]
    for one in random.Random(asked.seed).sample(whole, min(asked.draw, len(whole))):
        print(f"{one.kind} {one.file}: {one.text}")
    print("\nWrong:")
    for one in (one for one in found if one.wrong):
        print(f"{one.file}: {'; '.join(one.wrong)}: {one.text}")
    counts = counted(found)
    print(f"\n{len(found)} sentences; wrong, by kind: {counts}; at most: {dict(MOST)}")
    return int(any(counts[kind] > MOST[kind] for kind in MOST))


if __name__ == "__main__":
    raise SystemExit(main())
