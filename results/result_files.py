"""Read and write the files of results/ and their index.

Each file has a header of comment lines, followed by the results of a study as CSV.

python -m results.result_files        # write results/README.md again

`pandas.read_csv(path, comment="#")` reads a file of results/.
"""

import csv
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results"
COLUMNS = (
    "part",
    "configuration",  # a method, or a method with its settings
    "baseline",  # the baseline; empty if the value is not a difference
    "quantity",
    "value",
    "spread",  # standard deviation over seeds, unless the header says otherwise
    "low",
    "high",  # upper limit of the 95 % interval
    "p",  # corrected for all configurations
    "significant",
    "seeds",
    "n",  # number of test patients
    "text",  # text of a cell that contains more than a number
)
EMPTY, SIGNIFICANT = ("", "–", "-"), "**"
MEAN, LESS = "mean over sites", "less "
# title of the section whose p-values are corrected for its own questions only
DECLARED = "declared questions"
NUMBER = r"[+-]?\d[\d,]*\.?\d*(?:e-?\d+)?"
CELL = re.compile(
    rf"(?P<value>{NUMBER})(?: ± (?P<spread>{NUMBER}))?(?: \((?P<low>{NUMBER}) to (?P<high>{NUMBER})\))?"
    r"(?P<unit> ?(?:%|x|s|ms|MB|kB|MiB|GB|points|/s))?(?P<rest>.*)"
)
RANGE = re.compile(rf"(?P<low>{NUMBER}) to (?P<high>{NUMBER})")


def parsed(text: str) -> dict[str, str]:
    """Split the text of a table's cell into named parts, such as a value and its interval; examples are "+1.7 (-3.9 to
    +7.3)", "53.4 ± 0.5" and "never".

    >>> parsed("**+9.9 (+5.8 to +13.9)**")
    {'value': '+9.9', 'low': '+5.8', 'high': '+13.9', 'significant': 'yes'}
    """
    plain = text.replace(SIGNIFICANT, "").replace("−", "-").strip()
    if plain in EMPTY:
        return {}
    whole = RANGE.fullmatch(plain)
    found = whole or CELL.fullmatch(plain)
    told = {name: value for name, value in (found.groupdict() if found else {}).items() if value}
    unit, rest = told.pop("unit", ""), told.pop("rest", "")
    several = rest.startswith((",", " /", "/"))
    told = {} if several else {name: value.replace(",", "") for name, value in told.items()}
    if SIGNIFICANT in text and "low" in told:
        told["significant"] = "yes"
    if not found or unit or rest:
        told["text"] = plain.replace("#", "no. ")
    return told


@dataclass(frozen=True)
class Table:
    """A table of a study: the first `keys` columns name the configuration, and every other column is a quantity.

    A column "p" belongs to the quantity in the column before; a column "seeds" belongs to the whole row. A column "less
    X" has the difference between the row's value and X's value.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    part: str = ""
    baseline: str = ""
    seeds: str = ""
    keys: int = 1
    patients: Mapping[str, int] = field(default_factory=dict)  # number of tested patients for each quantity

    def lines(self) -> Iterator[dict[str, str]]:
        for row in self.rows:
            named = dict(zip(self.heads, row, strict=True))
            seeds = named.get("seeds", self.seeds)
            title = "; ".join(cell.replace("*", "").replace("`", "") for cell in row[: self.keys] if cell)
            first = {"part": self.part, "configuration": title.replace("#", "no. "), "baseline": self.baseline}
            cells = list(zip(self.heads, row, strict=True))[self.keys :]
            for place, (head, cell) in enumerate(cells):
                if head in ("p", "seeds") or not (told := parsed(cell)):
                    continue
                beside = cells[place + 1] if place + 1 < len(cells) else ("", "")
                p = {"p": beside[1]} if beside[0] == "p" and beside[1] not in EMPTY else {}
                less = {"baseline": head.removeprefix(LESS), "quantity": MEAN} if head.startswith(LESS) else {}
                n = str(self.patients.get(less.get("quantity", head), ""))
                yield {**first, "quantity": head.replace("`", ""), **less, **told, **p, "seeds": seeds, "n": n}


@dataclass(frozen=True)
class Study:
    header: Mapping[str, str | Sequence[str]]
    tables: Sequence[Table] = field(default_factory=tuple)

    def text(self) -> str:
        out = io.StringIO()
        for name, said in self.header.items():
            for line in (said,) if isinstance(said, str) else said:
                out.write(f"# {name}: {' '.join(line.split())}\n")
        writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(line for table in self.tables for line in table.lines())
        return out.getvalue()


def header_of(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("# "):
            break
        name, _, said = line.removeprefix("# ").partition(": ")
        found.setdefault(name, []).append(said)
    return found


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("# ")))


def index(folder: Path = FOLDER) -> str:
    lines = []
    for path in sorted(folder.glob("*.csv")):
        header = header_of(path)
        told = {name: " ".join(header.get(name, ["–"])) for name in ("title", "data", "date")}
        left = " **Unfinished.**" if "unfinished" in header else ""
        made = f"`{header['command'][0]}`" if "command" in header else "–"
        lines.append(
            f"| [{path.stem}]({path.name}) | {told['title']}.{left} | {told['data']} | {made} "
            f"| {len(rows_of(path)):,} | {told['date']} |"
        )
    return INTRODUCTION + "\n".join(lines) + "\n"


INTRODUCTION = """# Results

For: whoever wants a number that a page names, with its interval, its seeds and its command.

`python -m results.result_files` writes this index from the first lines of the files. Each file has one row per
configuration and quantity. `pandas.read_csv("results/patients.csv", comment="#")` reads it. Scores are in per cent
and differences in points, unless the quantity or the header says otherwise. The lines above the table say what was
declared before the runs, what was found, and with which version. [Which method](../docs/research/which-method.md)
draws conclusions from them.

[contrasts](contrasts.csv) answers the questions that [contrasts.yaml](contrasts.yaml) declared, from the scores of
single patients in `scores/`, without any training. Comparisons of before 29 November 2026 kept no such scores. Their
intervals added a patient who fails wholly to each hospital, and are withdrawn: these files have scores and
differences, and say so in their headers. Each command makes its file again, with [today's
intervals](../docs/research/compare.md#how-the-interval-is-made).

| file | study | data | made by | rows | date |
|---|---|---|---|---|---|
"""


def write_index(folder: Path = FOLDER) -> Path:
    path = folder / "README.md"
    path.write_text(index(folder), "utf-8")
    return path


def print_or_write(file: Path, text: str) -> None:
    """Print the text of a file; with --write on the command line, also write the file and the index."""
    print(text)
    if "--write" in sys.argv[1:]:
        file.write_text(text, "utf-8")
        write_index()


if __name__ == "__main__":
    print(write_index().relative_to(ROOT))
