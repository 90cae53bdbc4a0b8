"""The tables of docs/evidence.md: cells of the pages that have the numbers, so that no number is typed twice."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.markdown import table

HERE = Path(__file__).parent
ALONE, POOLED = "local", "central"  # rows that are no federation
MEAN = "mean over sites"
Row = dict[str, str]  # a table's row by its columns


@dataclass(frozen=True)
class Study:
    """A comparison on a page: the section with its scores, and in words what differs between the hospitals."""

    name: str
    differs: str
    page: str
    section: str


STUDIES = (
    Study("Nuclei, three public sets", "stains, scanners, organs", "study-nuclei", "# Methods on three"),
    Study("Heart disease, four hospitals", "countries, who was examined", "patients", "## UCI Heart"),
    Study("Breast cancer, survival (TCGA)", "regions", "patients", "## TCGA-BRCA"),
    Study("Prostate, SYNTHETIC", "what counts as the organ; looks", "baselines", "## Prostate"),
    Study("Activity, SYNTHETIC", "labels and devices", "baselines", "## Activity"),
    Study("Histology, SYNTHETIC", "stains, light, noise", "baselines", "## Histology"),
)
REAL = 3  # of them are real data
HEADLINES = r"HarmoFL(, \w+)?|(d-|f-)?adafed|fedsm"
FLAMBY = ("Fed-Heart-Disease", "Fed-TCGA-BRCA")


def lines_of(page: str, section: str) -> list[str]:
    """Return the lines of a page from the heading that begins so to the next of the same or a higher level."""
    lines = (HERE / page).read_text("utf-8").splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith(section)), None)
    if start is None:
        raise ValueError(f"{page} has no section '{section}'; correct docs/evidence.py")
    level = section.index(" ")
    rest = lines[start + 1 :]
    end = next((place for place, line in enumerate(rest) if re.match(rf"#{{1,{level}}} ", line)), len(rest))
    return [lines[start], *rest[:end]]


def rows_in(lines: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of the first table among these lines."""
    begun = False
    heads: list[str] = []
    for line in lines:
        if not line.startswith("|"):
            if begun:
                return
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if begun and not set(line) <= set("|- "):
            yield dict(zip(heads, (cell.strip() for cell in cells), strict=True))
        heads, begun = heads or cells, True


def unfinished(page: str) -> list[str]:
    """Return what is not done of a page of results: "16 of 90 runs"."""
    told = re.findall(r"(\d+) of (\d+) runs", (HERE / "results" / f"{page}.md").read_text("utf-8"))
    return [f"{done} of {asked} runs" for done, asked in told if done != asked]


def studies() -> str:
    """Return what came out of each comparison."""
    rows = []
    for study in STUDIES:
        page = f"results/{study.page}.md"
        lines = lines_of(page, study.section)
        scores = {row["row"]: row for row in rows_in(lines)}
        methods = [name for name in scores if name not in (ALONE, POOLED)]
        highest = max(methods, key=lambda name: _mean(scores[name][MEAN]))
        mean = next(name for name in methods if name.startswith("fedavg"))
        heading = next(line for line in lines if re.match(r"#+ Against ", line))
        difference = next(row for row in rows_in(lines[lines.index(heading) :]) if row["row"] == highest)[MEAN]
        against = heading.partition("Against ")[2].partition(":")[0]
        told = [scores[name][MEAN] if name in scores else "–" for name in (ALONE, mean, highest, POOLED)]
        best = f"{told[2]} ({highest})"
        rows.append(
            (f"[{study.name}]({page})", study.differs, told[0], told[1], best, f"{difference}, {against}", told[3])
        )
    heads = ("set", "what differs", "alone", "FedAvg", "highest federated row", "gain (95 % interval), over", "pooled")
    return table(heads, rows)


def headlines() -> str:
    """Return where HarmoFL, AdaFed and FedSM were on real data, less each of what a reader would do without them."""
    rows = []
    for study in STUDIES[:REAL]:
        lines = lines_of(f"results/{study.page}.md", study.section)
        scores = {row["row"]: row for row in rows_in(lines)}
        bases = [next((name for name in scores if name.startswith(base)), None) for base in ("fedavg", "fedbn", ALONE)]
        for name in scores:
            if re.fullmatch(HEADLINES, name):
                told = [_less(name, base, scores, lines) for base in bases]
                rows.append((f"[{study.name}](results/{study.page}.md)", name, scores[name][MEAN], *told))
    return table(("set", "method", "mean over sites", "less FedAvg", "less FedBN", "less alone"), rows)


def _less(name: str, base: str | None, scores: Mapping[str, Row], lines: Sequence[str]) -> str:
    """Return a method's difference from another row, with its interval where the page has one."""
    if base is None:
        return "–"
    for place, line in enumerate(lines):
        if re.match(rf"#+ Against {re.escape(base)}(,|$)", line):
            return next(row for row in rows_in(lines[place:]) if row["row"] == name)[MEAN]
    return f"{_mean(scores[name][MEAN]) - _mean(scores[base][MEAN]):+.1f}".replace("-", "−")


def flamby() -> str:
    """Return the federated cells of FLamby's two sets, beside pooled data."""
    lines = lines_of("reproduce.md", "## FLamby's tables")
    start = next(place for place, line in enumerate(lines) if line.startswith("| set |"))
    cells = [row for row in rows_in(lines[start:]) if row["tested on"] == "all hospitals"]
    rows = []
    for name in FLAMBY:
        here = {row["method"]: row["here"] for row in cells if row["set"] == name}
        highest = max((method for method in here if method != "pooled"), key=lambda method: _mean(here[method]))
        rows.append((name, here["fedavg"], f"{here[highest]} ({highest})", here["pooled"]))
    return table(("set", "FedAvg", "highest federated row", "pooled"), rows)


def _mean(cell: str) -> float:
    return float(cell.split()[0])
