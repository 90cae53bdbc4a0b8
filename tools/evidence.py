"""Make the tables on the pages in docs/research from the files in results/."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from medsilo.runs.score import DIGITS_OF_FEW, digits_of
from medsilo_lab.study.verdict_file import PairedDifference
from results import contrasts
from results.contrasts import Answers
from results.pages import ENSEMBLE, SELF_MADE
from results.result_files import FOLDER, MEAN, header_of, rows_of
from tools.markdown import table

ALONE, POOLED = "local", "central"  # configurations without federated training
Line = dict[str, str]  # a row of a results file


@dataclass(frozen=True)
class Study:
    """A study in a results file: its name, the difference between its hospitals, and the file's rows about the
    study.
    """

    name: str
    differs: str
    file: str
    part: str

    def lines(self, **wanted: str) -> list[Line]:
        wanted = {"part": self.part, "quantity": MEAN, **wanted}
        found = rows_of(FOLDER / f"{self.file}.csv")
        lines = [line for line in found if all(line[name] == value for name, value in wanted.items())]
        if not lines:
            raise ValueError(f"{self.file}.csv has no such lines: {wanted}; correct tools/evidence.py")
        return lines

    @property
    def scores(self) -> dict[str, Line]:
        return {line["configuration"]: line for line in self.lines(baseline="")}

    @property
    def size(self) -> str:
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
OLDER = {  # maps the baselines and methods in the table of older studies to their titles
    "local": "single-site",
    "fedavg": "FedAvg",
    "fedbn": "FedBN",
    "adafed": "AdaFed",
    "HarmoFL, mean": "HarmoFL, mean",
    "HarmoFL, whole": "HarmoFL, whole",
    "fedsm": "FedSM",
    "ditto": "Ditto",
    "central": "centralised",
}
# values of the column "part" in impact.csv
AUC, LARGE, SLOPE = "AUC, in per cent", "calibration in the large", "calibration slope"
FLAMBY = ("Fed-Heart-Disease", "Fed-TCGA-BRCA")


# method and baseline of the contrast that shows whether a hospital gains from federated training
JOINING = ("fedavg", "local")


@dataclass(frozen=True)
class Gain:
    method: str
    over: str
    set: str  # the value of the column "part" in published.csv
    ours: tuple[str, str, str, str] | None = None  # file, part, configuration, baseline
    data: str = ""

    def published(self, by: str) -> str:
        scores: dict[str, dict[str, float]] = {}
        for line in rows_of(FOLDER / "published.csv"):
            if line["part"] == self.set and line["quantity"] == by:
                scores.setdefault(line["text"].rsplit(": ", 1)[1], {})[line["configuration"]] = float(line["value"])
        known = {link: own for link, own in scores.items() if {self.method, self.over} <= own.keys()}
        gains = [(_minus(f"{own[self.method] - own[self.over]:+.1f}"), link) for link, own in known.items()]
        return ", ".join(f"[{gain}]({link})" for gain, link in gains) or "–"

    def measured(self) -> str:
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
    """Return a table of improvements: as measured in the methods' papers, with the authors' code, by other groups, and
    in this repository.
    """
    rows = [(f"{one.method} − {one.over}, {one.set}", *map(one.published, PUBLISHERS), one.measured()) for one in GAINS]
    return table(("gain", *PUBLISHERS, "ours"), rows)


def unfinished(file: str) -> list[str]:
    return header_of(FOLDER / f"{file}.csv").get("unfinished", [])


def older() -> str:
    """Return a table of scores for studies that have no scores of single patients."""
    rows = []
    for study in STUDIES:
        scores = study.scores
        shown = [next((name for name in scores if name.startswith(base)), None) for base in OLDER]
        rows.append((study.name, study.size, *(_score(scores.get(name or "")) for name in shown)))
    return table(("set", "n", *OLDER.values()), rows)


def scores() -> str:
    """Return a table of scores for each data set: the scores of the baselines, and the score of the method that
    validation cases choose.
    """
    rows = []
    for one in _whole():
        told = [_mean(one, name) for name in ("local", ENSEMBLE, "fedavg", one.chosen)]
        told[-1] += f" ({one.chosen})" if one.chosen else ""
        rows.append((*_set(one), f"{one.patients} patients, {len(one.kept.seeds)} seeds", *told))
    heads = ("set", "what differs", "n", "single-site", "ensemble of these", "FedAvg", "chosen by validation cases")
    return table(heads, rows)


def _whole() -> list[Answers]:
    return [one for one in contrasts.answers() if "groups" not in contrasts.declaration().sets[one.name]]


# the group of contrasts about weights, and the baselines that its table also lists
WEIGHTS, WEIGHERS = "weights", ("local", "fedavg", "fedavg, hospitals alike")


def weights() -> str:
    """Return a table of FedAvg and of methods whose weights depend on heterogeneity, for each data set that declares
    their contrasts.
    """
    pairs = dict(contrasts.declaration().groups[WEIGHTS])
    rows = []
    for one in contrasts.answers():
        if WEIGHTS not in contrasts.declaration().sets[one.name].get("groups", ()):
            continue
        size = f"{one.patients:,} patients, {len(one.kept.seeds)} seeds"
        for name in (*WEIGHERS, *pairs):
            told = one.found.get((name, pairs.get(name, "")))
            difference = _minus(contrasts.difference_of(told)) if told else "–"
            unseen = _minus(contrasts.unseen_of(told)) if told else "–"
            rows.append((_set(one)[0], size, name, _mean(one, name), difference, unseen or "–"))
    return table(("set", "n", "configuration", "mean score", "− FedAvg", "if an unseen kind fails"), rows)


def _set(one: Answers) -> tuple[str, str]:
    told = contrasts.declaration().sets[one.name]
    return told["title"], told["differs"]


def _mean(one: Answers, name: str | None) -> str:
    """Return a mean score in %, with the digits that the number of patients justifies."""
    if not name or name not in one.kept.scores:
        return "–"
    return f"{100 * one.mean(name):.{digits_of(one.patients) - DIGITS_OF_FEW}f}"


def group(*names: str) -> Callable[[], str]:
    def made() -> str:
        asked = [pair for name in names for pair in contrasts.declaration().groups[name]]
        kinds = [pair for pair in asked if any(_answer(one, pair) for one in _whole())]
        rows = [
            (told[0], told[1], *(_answer(one, pair) or "–" for pair in kinds))
            for one in _whole()
            for told in [_set(one)]
        ]
        return table(
            ("set", "what differs", *(f"{_in_brackets(one)} − {_in_brackets(other)}" for one, other in kinds)), rows
        )

    return made


def _answer(one: Answers, pair: tuple[str, str]) -> str:
    method, base = (one.chosen or "", pair[1]) if pair[0] == contrasts.CHOSEN else pair
    if (method, base) not in one.found:
        return ""
    return _minus(contrasts.difference_of(one.found[method, base]))


def told_twice() -> str:
    """Return a table of contrasts with two results from the same scores: by the statistics before 29 November 2026, and
    by today's statistics.
    """
    before = {
        (line["part"], line["configuration"], line["baseline"], line["quantity"]): line
        for line in rows_of(FOLDER / "told-twice.csv")
    }
    rows = []
    for one in contrasts.answers():
        asked = {(*pair, MEAN): now for pair, now in one.found.items()}
        asked |= {(*JOINING, site): now for site, now in one.of_hospitals(*JOINING).items()}
        for (method, base, where), now in asked.items():
            if then := before.get((one.name, method, base, where)):
                at = "" if where == MEAN else f": hospital {where}"
                told = (_set(one)[0] + at, f"{_in_brackets(method)} − {_in_brackets(base)}", _difference(then))
                rows.append((*told, _minus(contrasts.difference_of(now)), ", ".join(_changed(then, now))))
    return table(("set, hospital", "contrast", "before", "now", "what changed"), rows)


def _in_brackets(name: str) -> str:
    """Return the name of a configuration with its variant in brackets: "FedAvg (twice the steps)"."""
    return re.sub(", (.*)", r" (\1)", name)


def _changed(then: Line, now: PairedDifference) -> Iterator[str]:
    """Yield the change of the verdict, if any, and then the new interval's width divided by the earlier interval's
    width.
    """
    was, low, high = bool(then["significant"]), float(then["low"]), float(then["high"])
    if was != now.sure:
        word = "better" if now.mean > 0 else "worse"
        yield f'verdict now "{word}"' if now.sure else 'verdict now "inconclusive"'
    yield f"interval {100 * (now.interval[1] - now.interval[0]) / (high - low):.2f} times as wide as before"


def laboratories() -> str:
    """Return a table of scores from the study of two laboratories, by method and by preprocessing of the images."""
    scores = LABORATORIES.scores
    rows = [
        (name, *(_score(scores.get(f"{name}{look}")) for look in ("", *(f", {one}" for one in SELF_MADE))))
        for name in _of_same_images(scores)
    ]
    return table(("", "images as they are", *SELF_MADE), rows)


def flamby() -> str:
    """Return a table of federated results and centralised results on two data sets of FLamby."""
    rows = []
    for name in FLAMBY:
        found = rows_of(FOLDER / "flamby.csv")
        keys = {tuple(line["configuration"].split("; ")): line for line in found if line["quantity"] == "here"}
        here = {key[1]: line for key, line in keys.items() if key[0] == name and key[2] == "all hospitals"}
        highest = max((one for one in here if one != "pooled"), key=lambda one: float(here[one]["value"]))
        rows.append((name, _score(here["fedavg"]), f"{_score(here[highest])} ({highest})", _score(here["pooled"])))
    return table(("set", "FedAvg", "highest federated", "centralised"), rows)


def impact() -> str:
    """Return a table about predictions for studies that took no part in training: the mean, lowest and highest AUC, and
    the calibration.
    """
    lines = rows_of(FOLDER / "impact.csv")
    rows = []
    for name in dict.fromkeys(line["configuration"] for line in lines):
        own = [line for line in lines if line["configuration"] == name and not line["baseline"]]
        aucs = sorted(line["value"] for line in own if line["part"] == AUC and line["quantity"] != MEAN)
        mean, slope = (line["value"] for line in own if line["part"] in (AUC, SLOPE) and line["quantity"] == MEAN)
        less = [line for line in lines if line["configuration"] == name and line["part"] == AUC and line["baseline"]]
        difference = f"{_difference(less[0])} points compared with {less[0]['baseline']}" if less else "–"
        rows.append((name, f"{mean} ({aucs[0]} to {aucs[-1]})", difference, slope))
    return table(("configuration", AUC, "difference", "slope"), rows)


def impact_studies() -> str:
    wanted = [(AUC, "pooled logistic regression"), *((part, "FedAvg") for part in (AUC, LARGE, SLOPE))]
    lines = [line for line in rows_of(FOLDER / "impact.csv") if line["quantity"] != MEAN]
    found = {(line["part"], line["configuration"], line["quantity"]): line for line in lines}
    rows = []
    for study in dict.fromkeys(line["quantity"] for line in lines):
        cells = [found[part, name, study] for part, name in wanted]
        rows.append((study, cells[0]["n"], *map(_difference, cells)))
    return table(("study", "patients", *(f"{name}: {part}" for part, name in wanted)), rows)


def intervals() -> str:
    """Return a table with the lowest and the highest result of each simulation of confidence intervals."""
    lines = rows_of(FOLDER / "intervals.csv")
    rows = []
    for words, part, quantity, of in (
        (
            "coverage of the interval of one model's score, for 2 to 16 patients and {} kinds of score",
            "one model's score",
            "covered",
            "",
        ),
        (
            'coverage of the interval "for patients like these", in {} kinds of study with eight patients or more',
            ALIKE_PATIENTS,
            LIKE,
            MANY,
        ),
        (
            'coverage of the interval "for patients like these", in {} kinds of study with five patients',
            ALIKE_PATIENTS,
            LIKE,
            FIVE,
        ),
        (
            'coverage of the interval "for patients like these", in {} kinds of study whose score is an AUROC, a '
            "balanced accuracy or a concordance",
            "a difference of ranks",
            LIKE,
            "",
        ),
        (
            'coverage of the interval "for patients like these", in {} kinds of study where a method fails for 5 to '
            "25 % of patients (we claim no coverage here)",
            "a difference, patients fail",
            LIKE,
            "",
        ),
        (
            'coverage of the interval "if an unseen kind fails", where a method fails for 5 to 25 % of patients '
            "({} kinds)",
            "a difference, patients fail",
            UNSEEN,
            "",
        ),
        (
            "width of our interval, or number of patients needed with it, divided by the value for Student's exact "
            "interval, for 5 to 50 patients",
            EXACT,
            "over",
            "",
        ),
        (
            "fraction of false verdicts, if all four configurations are equally good ({} kinds of study)",
            "four rows without a difference",
            "false",
            "",
        ),
        (
            "fraction of studies that find a difference for which medsilo reports a power of 0.80 ({} kinds)",
            "reported power",
            "found",
            "",
        ),
    ):
        own = [line for line in lines if line["part"] == part and line["quantity"].startswith(quantity)]
        own = [line for line in own if re.search(of, line["configuration"])]
        ends = (end(own, key=lambda line: float(line["value"]))["value"] for end in (min, max))
        rows.append((words.format(len({line["configuration"] for line in own})), " to ".join(ends)))
    return table(("simulated", "result"), rows)


# values of the column "part" in intervals.csv
ALIKE_PATIENTS, EXACT = "a difference", "beside Student's interval, where that is exact"
LIKE, UNSEEN = "covered, patients like these", "covered, if an unseen kind fails"
FIVE, MANY = "1 x 5 ", "^(?!.*1 x 5 )"


def _of_same_images(names: Iterable[str]) -> list[str]:
    """Return the configurations with unchanged images, because scores on differently prepared images cannot be
    compared.
    """
    return [name for name in names if name.rpartition(", ")[2] not in SELF_MADE]


def _score(line: Line | None) -> str:
    return f"{line['value']} ± {line['spread']}" if line else "–"


def _difference(line: Line) -> str:
    text = _minus(f"{line['value']} ({line['low']} to {line['high']})" if line["low"] else line["value"])
    return f"**{text}**" if line["significant"] else text


def _minus(text: str) -> str:
    return text.replace("-", "−")
