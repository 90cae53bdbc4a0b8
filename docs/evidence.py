"""Tables of docs/research: numbers of the files in results/, so that none is typed twice."""

import re
from dataclasses import dataclass

from docs.markdown import table
from results.pages import SELF_MADE
from results.result_files import DECLARED, FOLDER, MEAN, header_of, rows_of

ALONE, POOLED = "local", "central"  # configurations that are no federation
Line = dict[str, str]  # a line of a file


@dataclass(frozen=True)
class Study:
    """A part of a file: its hospitals in words, and what differs between them."""

    name: str
    differs: str
    file: str
    part: str

    def lines(self, **wanted: str) -> list[Line]:
        """Return the lines of the mean over sites."""
        wanted = {"part": self.part, "quantity": MEAN, **wanted}
        found = rows_of(FOLDER / f"{self.file}.csv")
        lines = [line for line in found if all(line[name] == value for name, value in wanted.items())]
        if not lines:
            raise ValueError(f"{self.file}.csv has no such lines: {wanted}; correct docs/evidence.py")
        return lines

    def differences(self, name: str, base: str) -> list[Line]:
        """Return how a configuration differs from another: the answer to a declared question first."""
        wanted = {"configuration": name, "baseline": base, "quantity": MEAN}
        found = rows_of(FOLDER / f"{self.file}.csv")
        own = [line for line in found if all(line[key] == value for key, value in wanted.items())]
        return [line for part in (DECLARED, self.part) for line in own if line["part"] == part]

    @property
    def scores(self) -> dict[str, Line]:
        """The scores, by configuration."""
        return {line["configuration"]: line for line in self.lines(baseline="")}

    @property
    def size(self) -> str:
        """How many test patients and seeds are behind the scores."""
        first = next(iter(self.scores.values()))
        return f"{first['n']} patients, {first['seeds']} seeds" if first["n"] else f"{first['seeds']} seeds"


LABORATORIES = Study(
    "White blood cells, two laboratories", "stains, cameras; an image counts as a patient", "laboratories", ""
)
STUDIES = (
    Study("Nuclei, three public sets", "stains, scanners, organs", "study-nuclei", ""),
    LABORATORIES,
    Study("Heart disease, four hospitals", "countries, who was examined", "patients", "UCI Heart Disease"),
    Study("Breast cancer, survival (TCGA)", "regions", "patients", "TCGA-BRCA: the model after the last round"),
    Study("Prostate, synthetic", "what counts as the organ", "baselines", "Prostate: what counts as the organ differs"),
    Study("Activity, synthetic", "labels and devices", "baselines", "Activity: label and feature shift"),
    Study("Histology, synthetic", "stains, light, noise", "baselines", "Histology: appearance shift"),
)
REAL = 4  # of them are real data
HEADLINES = r"HarmoFL(, \w+)?|(f-)?adafed|fedsm"
AUC, LARGE, SLOPE = "AUC, in per cent", "calibration in the large", "calibration slope"  # parts of impact.csv
FLAMBY = ("Fed-Heart-Disease", "Fed-TCGA-BRCA")


@dataclass(frozen=True)
class Gain:
    """A method's gain over another on one set, as others publish it, and where ours is."""

    method: str
    over: str
    set: str  # the part of published.csv
    ours: tuple[str, str, str, str] | None = None  # file, part, configuration, baseline
    data: str = ""  # of ours

    def published(self, by: str) -> str:
        """Return the gain in each source of this kind; sources have one score of each method."""
        scores: dict[str, dict[str, float]] = {}
        for line in rows_of(FOLDER / "published.csv"):
            if line["part"] == self.set and line["quantity"] == by:
                scores.setdefault(line["text"].rsplit(": ", 1)[1], {})[line["configuration"]] = float(line["value"])
        known = {link: own for link, own in scores.items() if {self.method, self.over} <= own.keys()}
        gains = [(_minus(f"{own[self.method] - own[self.over]:+.1f}"), link) for link, own in known.items()]
        return ", ".join(f"[{gain}]({link})" for gain, link in gains) or "–"

    def measured(self) -> str:
        """Return our difference with its interval."""
        if self.ours is None:
            return "–"
        file, part, configuration, baseline = self.ours
        lines = Study("", "", file, part).lines(configuration=configuration, baseline=baseline)
        return f"{_difference(lines[0])}, [{self.data}](../../results/{file}.csv)"


NUCLEI = ("harmofl-nuclei", "", "HarmoFL, whole", "FedAvg")
ALIKE = ("fedsm-synthetic", "High similarity", "fedsm", "fedavg")
TWO_ORGANS = ("fedsm-synthetic", "Low similarity", "fedsm", "fedavg")
GAINS = (
    Gain("HarmoFL", "FedAvg", "Nuclei", NUCLEI, "222 tiles"),
    Gain("HarmoFL", "FedAvg", "Prostate MRI"),
    Gain("FedSM", "FedAvg", "Prostate MRI", ALIKE, "synthetic, alike"),
    Gain("FedSM", "FedAvg", "Retinal images", TWO_ORGANS, "synthetic, two organs"),
    Gain("AdaFed", "FedAvg", "OrganSMNIST"),
    Gain("AdaFed", "FedBN", "OrganSMNIST"),
    Gain("AdaFed", "FedAvg", "OrganSMNIST, α = 0.01"),
)
PUBLISHERS = ("paper", "authors' code", "others")


def reruns() -> str:
    """Return each gain in the paper, in its authors' code, by others, and here."""
    rows = [(f"{one.method} − {one.over}, {one.set}", *map(one.published, PUBLISHERS), one.measured()) for one in GAINS]
    return table(("gain", *PUBLISHERS, "ours"), rows)


def unfinished(file: str) -> list[str]:
    """Return what is not done of a file: "16 of 90 runs"."""
    return header_of(FOLDER / f"{file}.csv").get("unfinished", [])


def studies() -> str:
    """Return what came out of each comparison."""
    rows = []
    for study in STUDIES:
        scores = study.scores
        methods = [name for name in scores if name.partition(",")[0] not in (ALONE, POOLED)]
        highest = max(methods, key=lambda name: float(scores[name]["value"]))
        average = next(name for name in methods if name.startswith("fedavg"))
        (difference,) = study.lines(configuration=highest, baseline=average)
        told = [_score(scores.get(name)) for name in (ALONE, average, highest, POOLED)]
        named = f"{told[2]} ({highest})"
        rows.append((study.name, study.size, study.differs, *told[:2], named, _difference(difference), told[3]))
    heads = ("set", "n", "what differs", "single-site", "FedAvg", "highest federated", "minus FedAvg", "centralised")
    return table(heads, rows)


def headlines() -> str:
    """Return where HarmoFL, AdaFed and FedSM were on real data, less each of what a reader would do without them."""
    rows = []
    for study in STUDIES[:REAL]:
        scores = study.scores
        bases = [next((name for name in scores if name.startswith(base)), None) for base in ("fedavg", "fedbn", ALONE)]
        for name in (name for name in scores if re.fullmatch(HEADLINES, name)):
            rows.append((study.name, name, _score(scores[name]), *(_less(study, name, base) for base in bases)))
    return table(("set", "method", MEAN, "minus FedAvg", "minus FedBN", "minus single-site"), rows)


def _less(study: Study, name: str, base: str | None) -> str:
    """Return a method's difference from another, with its interval where the file has one."""
    if base is None:
        return "–"
    if found := study.differences(name, base):
        return _difference(found[0])
    scores = study.scores
    return _minus(f"{float(scores[name]['value']) - float(scores[base]['value']):+.1f}")


def laboratories() -> str:
    """Return the scores of two laboratories by method and by what each does to its images beforehand."""
    scores = LABORATORIES.scores
    methods = [name for name in scores if name.rpartition(", ")[2] not in SELF_MADE]
    rows = [
        (name, *(_score(scores.get(f"{name}{look}")) for look in ("", *(f", {one}" for one in SELF_MADE))))
        for name in methods
    ]
    return table(("", "images as they are", *SELF_MADE), rows)


def declared() -> str:
    """Return the answers to the questions that were declared of two laboratories."""
    found = [line for line in rows_of(FOLDER / f"{LABORATORIES.file}.csv") if line["part"] == DECLARED]
    return table(
        ("configuration", "minus", "points"),
        [(line["configuration"], line["baseline"], _difference(line)) for line in found],
    )


def flamby() -> str:
    """Return the federated cells of FLamby's two sets, beside centralised training."""
    rows = []
    for name in FLAMBY:
        found = rows_of(FOLDER / "flamby.csv")
        keys = {tuple(line["configuration"].split("; ")): line for line in found if line["quantity"] == "here"}
        here = {key[1]: line for key, line in keys.items() if key[0] == name and key[2] == "all hospitals"}
        highest = max((one for one in here if one != "pooled"), key=lambda one: float(here[one]["value"]))
        rows.append((name, _score(here["fedavg"]), f"{_score(here[highest])} ({highest})", _score(here["pooled"])))
    return table(("set", "FedAvg", "highest federated", "centralised"), rows)


def impact() -> str:
    """Return how models of other studies predict a study that did not train: the mean, the lowest, the highest."""
    lines = rows_of(FOLDER / "impact.csv")
    rows = []
    for name in dict.fromkeys(line["configuration"] for line in lines):
        own = [line for line in lines if line["configuration"] == name and not line["baseline"]]
        aucs = sorted(line["value"] for line in own if line["part"] == AUC and line["quantity"] != MEAN)
        mean, slope = (line["value"] for line in own if line["part"] in (AUC, SLOPE) and line["quantity"] == MEAN)
        less = [line for line in lines if line["configuration"] == name and line["part"] == AUC and line["baseline"]]
        difference = f"{_difference(less[0])} from {less[0]['baseline']}" if less else "–"
        rows.append((name, f"{mean} ({aucs[0]} to {aucs[-1]})", difference, slope))
    return table(("configuration", AUC, "difference", "slope"), rows)


def impact_studies() -> str:
    """Return pooled regression and FedAvg at each study that was left out."""
    wanted = [(AUC, "pooled logistic regression"), *((part, "FedAvg") for part in (AUC, LARGE, SLOPE))]
    lines = [line for line in rows_of(FOLDER / "impact.csv") if line["quantity"] != MEAN]
    found = {(line["part"], line["configuration"], line["quantity"]): line for line in lines}
    rows = []
    for study in dict.fromkeys(line["quantity"] for line in lines):
        cells = [found[part, name, study] for part, name in wanted]
        rows.append((study, cells[0]["n"], *map(_difference, cells)))
    return table(("study", "patients", *(f"{name}: {part}" for part, name in wanted)), rows)


def intervals() -> str:
    """Return the lowest and the highest number of each simulation of intervals."""
    lines = rows_of(FOLDER / "intervals.csv")
    rows = []
    for words, part, quantity, of in (
        ("coverage of one model's score, 2 to 16 patients, {} kinds of score", "one model's score", "covered", ""),
        ("coverage of a difference, {} kinds of study", "a difference", "covered", ""),
        (
            "half the interval's width, three hospitals of 20 patients, in standard deviations; 1.96 is needed",
            "a difference",
            "half its width",
            "3 x 20",
        ),
        ("share of studies that find what was reported with power 0.80, {} kinds", "reported power", "found", ""),
    ):
        own = [line for line in lines if line["part"] == part and line["quantity"].startswith(quantity)]
        own = [line for line in own if of in line["configuration"]]
        ends = (end(own, key=lambda line: float(line["value"]))["value"] for end in (min, max))
        rows.append((words.format(len({line["configuration"] for line in own})), " to ".join(ends)))
    return table(("simulated", "result"), rows)


def _score(line: Line | None) -> str:
    return f"{line['value']} ± {line['spread']}" if line else "–"


def _difference(line: Line) -> str:
    text = _minus(f"{line['value']} ({line['low']} to {line['high']})")
    return f"**{text}**" if line["significant"] else text


def _minus(text: str) -> str:
    return text.replace("-", "−")
