"""Define the studies as data: task, rows, seeds, rounds, folds, and the question that was declared before any run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

HAR = "har_uci"  # recorded activity, whose time steps must be put in order
HEART, BRCA, IMPACT = "heart_uci", "tcga_brca", "impact"  # tables of patients
BRAINS = "brains"  # generated volumes
CELLS = "wbc_2labs"  # white blood cells, one folder for each laboratory
VOLUMES = "hippocampus"  # volumes whose slices become hospitals that differ in one way
DEAREST = ("fedsm", "fedsm-extra", "fedsm-ensemble")


LOOK, ANATOMY, SENSORS = "look", "anatomy", "sensors"


@dataclass(frozen=True)
class Shift:
    """A simulated kind of difference between hospitals; `power` is the strength of the difference in one part of the
    page.
    """

    kind: str
    power: float
    axis: str
    control: str  # the row with the same cost as the tested method, but without the method's idea


@dataclass(frozen=True)
class Part:
    """One comparison of a page, with the arguments of `medsilo compare`."""

    name: str
    title: str
    rows: tuple[str, ...]  # each row is a method, or "title: key=value key=value"
    baseline: str
    why: str  # the reason for the question, which was chosen before any run
    plan: str = ""  # a plan file or job of the repository; an empty text if `task` is set instead
    task: str = ""
    changes: tuple[str, ...] = ()
    seeds: int = 10
    # titles or methods of rows that run one after the other, after all seeds of all other rows
    later: tuple[str, ...] = DEAREST
    folds: int | None = None
    beside: tuple[str, ...] = ()  # further baselines, for differences that are exploratory and not declared
    # further declared questions of the part; each consists of a row and the row's baseline
    asked: tuple[tuple[str, str], ...] = ()
    data: str = ""  # a folder of real data
    shift: int | None = None  # the seed of the shift that is induced in recorded activity
    stress: str = ""  # the single difference between hospitals that get their volumes from `VOLUMES`
    # True: contrasts.yaml declares the part's contrasts, so patients' scores are stored, and ensembles of single-site
    # models are scored.
    elsewhere: bool = False
    people: bool = False  # every site is one person, so that the test at other sites is a test on other people
    # If `made_up` is set, `baseline` is the tested method, and the page reports the difference of this method from
    # every other row.
    made_up: Shift | None = None


@dataclass(frozen=True)
class Page:
    title: str
    data: str
    words: str
    parts: tuple[Part, ...]


ALONE, UNIFORM = "local", ":weighting=uniform"
ADAFED = (
    ALONE,
    f"fedavg{UNIFORM}",
    f"fedprox{UNIFORM}",
    f"fedper{UNIFORM}",
    f"fedbn{UNIFORM}",
    "adafed",
    "d-adafed",
    "f-adafed",
    "adafed:weights=uniform",
)
MEAN_BAND = "HarmoFL, mean: algorithm.name=harmofl algorithm.amplitude.band=0.0"
WHOLE = "HarmoFL, whole: algorithm.name=harmofl"
HARMOFL = (
    ALONE,
    "FedAvg: algorithm.name=fedavg algorithm.weighting=uniform",
    "FedProx: algorithm.name=fedprox algorithm.weighting=uniform algorithm.mu=0.1",
    "FedAdam: algorithm.name=fedadam algorithm.weighting=uniform",
    "FedBN: algorithm.name=fedbn algorithm.weighting=uniform",
    "+ amplitude, whole: algorithm.name=harmofl algorithm.perturbation=null",
    "+ amplitude, band 0.1: algorithm.name=harmofl algorithm.perturbation=null algorithm.amplitude.band=0.1",
    "+ amplitude, mean: algorithm.name=harmofl algorithm.perturbation=null algorithm.amplitude.band=0.0",
    "+ perturbation: algorithm.name=harmofl algorithm.amplitude=null",
    WHOLE,
    MEAN_BAND,
    "FedAvg, batch statistics: algorithm.name=fedavg algorithm.weighting=uniform network.norm=batch-statistics",
    "HarmoFL, whole, batch statistics: algorithm.name=harmofl network.norm=batch-statistics",
    "HarmoFL, mean, batch statistics: algorithm.name=harmofl algorithm.amplitude.band=0.0 "
    "network.norm=batch-statistics",
)
FEDAVG = "algorithm.name=fedavg algorithm.weighting=uniform"
LOOKS = ("centred", "standardised", "histograms matched", "stains normalised")
RATES = ("0.017", "0.15")  # a third of the plan's learning rate, and three times the plan's learning rate
CONTROLS = (
    ALONE,
    f"FedAvg: {FEDAVG}",
    MEAN_BAND,
    WHOLE,
    *(f"FedAvg, {look}: {FEDAVG}" for look in LOOKS),
    *(f"local, {look}: algorithm.name=local" for look in LOOKS),
    f"FedAvg, twice the steps: {FEDAVG} training.local_epochs=2",
    *(f"FedAvg, rate {rate}: {FEDAVG} training.learning_rate={rate}" for rate in RATES),
    *(f"HarmoFL, mean, rate {rate}: {MEAN_BAND.partition(': ')[2]} training.learning_rate={rate}" for rate in RATES),
)
FIRST_CONTROLS = (ALONE, "FedAvg", "HarmoFL, mean", "FedAvg, centred", "local, centred")
SEVEN = (ALONE, "central", "fedavg", "fedbn", WHOLE, MEAN_BAND, "adafed", "fedsm")
EVERY = (
    ALONE,
    "central",
    *("fedavg", "fedprox", "fedprox:partial=0.5", "fedbn", "fedper", "fednova", "fedavgm", "fedadam", "fedyogi"),
    *("scaffold", "moon", "ditto", "apfl", "apfl:adaptive=true", "mr-mtl", "per-fedavg", "pfedme", "fine-tuning"),
    *("adafed", "d-adafed", "f-adafed", "fedsm", "fedsm-extra", "fedsm-ensemble"),
)
COSTLY = (
    *("fednova", "fedavgm", "fedadam", "fedyogi", "mr-mtl", "moon", "apfl", "fine-tuning", "per-fedavg"),
    *("fedprox:partial=0.5", "apfl:adaptive=true", "pfedme", "fedsm-extra", "fedsm-ensemble"),
)
STEP = "HarmoFL, step: algorithm.name=harmofl algorithm.amplitude=null"  # a table has no spectrum
NEWER = ("silobn", "fedrep", "fedbabu", "fedrod", "fedala", "feddyn", "fedlws", "fedawa", "fedce")
OF_PATIENTS = (*EVERY[:2], STEP, "cyclic", "fedadagrad", *NEWER, *EVERY[2:])
PULLED = tuple(f"fedsm:pull={pull}" for pull in (0.1, 0.3, 0.5, 0.9))
FEDSM = (ALONE, "central", "fedavg", "fedprox", "fedsm", "fedsm-extra", "fedsm-ensemble", *PULLED)

SITES_COUNT_ALIKE = "hospitals count alike, as in the methods' papers; test sets differ in size by chance"
SIMILARITY = (
    "the mean over sites is the score of the AdaFed paper; against FedBN, because AdaFed adds to it that similar sites "
    "learn more from each other"
)
PLAIN_SGD = ("training.momentum=0", "training.weight_decay=0", "model_selection.keep=last")


def _similar(name: str, title: str, *changes: str, **more: Any) -> Part:
    return Part(
        name,
        title,
        ADAFED,
        f"fedbn{UNIFORM}",
        SIMILARITY,
        plan="jobs/adafed",
        changes=(*changes, *PLAIN_SGD),
        beside=(ALONE,),
        **more,
    )


def _windows(name: str, title: str, sites: Iterable[str], rounds: int, rate: float, *changes: str, **more: Any) -> Part:
    training = (f"training.rounds={rounds}", "training.batch_size=32", f"training.learning_rate={rate}")
    return _similar(name, title, *changes, f"participation.sites=[{','.join(sites)}]", *training, **more)


def _har(name: str, title: str, shift: int | None) -> Part:
    later = ("fedavg", "adafed:weights=uniform", "fedprox", "fedper", "d-adafed", "f-adafed")
    more = {"later": later, "data": HAR, "shift": shift, "people": True}
    people = (f"subject_{number:02d}" for number in range(1, 21))
    return _windows(name, title, people, 50, 0.01, "task.name=activity-windows", **more)


def _activity(shift: str, title: str) -> Part:
    task = ("task.name=synthetic-activity", f"task.shift={shift}", "task.persons=8", "task.windows=40")
    hospitals = (f"hospital-{number:02d}" for number in range(1, 9))
    return _windows(shift, title, hospitals, 20, 0.05, *task)


def _synthetic(task: str, title: str, rows: tuple[str, ...], *changes: str) -> Part:
    images = (WHOLE, MEAN_BAND) if task != "activity" else ()  # data without images have no amplitude
    return Part(
        task,
        title,
        (*rows, *images),
        "fedavg",
        SITES_COUNT_ALIKE,
        task=f"synthetic-{task}",
        changes=changes,
        later=COSTLY,
    )


def _prostate(similarity: str) -> Part:
    return Part(
        similarity,
        f"{similarity.capitalize()} similarity",
        FEDSM,
        "fedavg",
        SITES_COUNT_ALIKE,
        task="synthetic-prostate",
        changes=(
            f"task.similarity={similarity}",
            "task.patients=5",
            "network.name=unet",
            "network.norm=instance",
            "participation.sites=[a,b,c,d,e,f]",
            "training.rounds=15",
            "training.batch_size=4",
            "training.optimizer=adam",
            "training.momentum=0",
            "training.weight_decay=0",
            "training.learning_rate=0.001",
        ),
        later=PULLED,
    )


NUCLEI = (
    "MoNuSAC 2020, MoNuSeg 2018 and TNBC as three hospitals; tiles of a patient or source image stay together. "
    "Patients take turns in the test part, so that each is tested once with every seed. A small U-Net, few rounds, one "
    "learning rate and no number tuned for any method: the rows compare under these terms and are not the papers' "
    "numbers."
)


def _patients(data: str, title: str, plan: str, without: tuple[str, ...]) -> Part:
    return Part(
        data,
        title,
        tuple(row for row in OF_PATIENTS if row not in without),
        "fedavg",
        SITES_COUNT_ALIKE,
        plan=f"results/plans/{plan}.yaml",
        seeds=5,
        beside=(ALONE,),
        data=data,
    )


TWICE = "FedAvg, twice the steps"
FEDBN = "FedBN: algorithm.name=fedbn algorithm.weighting=uniform"
CENTRED = f"FedAvg, centred: {FEDAVG}"


def _look(power: float) -> Part:
    return Part(
        f"look-{power:g}",
        "Appearance: HarmoFL",
        (ALONE, f"FedAvg: {FEDAVG}", WHOLE, FEDBN, f"{TWICE}: {FEDAVG} training.local_epochs=2", CENTRED, MEAN_BAND),
        "HarmoFL, whole",
        "Four hospitals stain, light and blur differently, and classify the same cells; at power 1 as on the page of "
        "synthetic histology, at 2 twice as far from a common look. HarmoFL's step takes two gradients, hence the "
        "control with twice the steps.",
        plan="jobs/harmofl/plans/synthetic.yaml",
        changes=(
            f"task.shift={power}",
            "task.patients=16",
            "task.size=32",
            "training.rounds=15",
            "participation.sites=[hospital-a,hospital-b,hospital-c,hospital-d]",
        ),
        seeds=5,
        later=("HarmoFL, mean",),
        made_up=Shift(LOOK, power, "distance of the looks", TWICE),
    )


def _anatomy(power: int) -> Part:
    return Part(
        f"anatomy-{power}",
        "Another anatomy: FedSM",
        (ALONE, f"FedAvg: {FEDAVG}", "fedsm", "ditto", f"{TWICE}: {FEDAVG} training.local_epochs=2"),
        "fedsm",
        "Of four hospitals so many call the dark ellipsoid the organ, and the others the bright one; nothing else "
        "changes. FedSM trains a common and an own network at each hospital, as Ditto does, which is its control.",
        task="synthetic-prostate",
        changes=(
            "task.patients=5",
            "task.size=32",
            "network.name=unet",
            "network.norm=instance",
            "participation.sites=[a,b,c,d]",
            "training.rounds=15",
            "training.batch_size=4",
            "training.optimizer=adam",
            "training.momentum=0",
            "training.weight_decay=0",
            "training.learning_rate=0.001",
        ),
        seeds=5,
        later=(),
        made_up=Shift(ANATOMY, power, "hospitals with the other organ", "ditto"),
    )


def _sensors(power: float) -> Part:
    unlike = "AdaFed, all alike"
    return Part(
        f"sensors-{power:g}",
        "Other sensors: AdaFed",
        (ALONE, f"FedAvg: {FEDAVG}", FEDBN, "adafed", f"{unlike}: algorithm.name=adafed algorithm.weights=uniform"),
        "adafed",
        "Six hospitals wear two families of sensors in turn, with other gains, offsets, noise and clocks; at power 1 "
        "as on the page of synthetic activity, at 2 twice as far from common ones. The control has AdaFed's λ without "
        "similarity: every other hospital counts alike.",
        plan="jobs/adafed",
        changes=(
            "task.name=synthetic-activity",
            "task.shift=feature",
            "task.persons=10",
            "task.windows=40",
            f"participation.sites=[{','.join(f'hospital-{number}' for number in range(1, 7))}]",
            "training.rounds=15",
            "training.batch_size=32",
        ),
        seeds=5,
        made_up=Shift(SENSORS, power, "distance of the sensors", unlike),
    )


SELF_MADE = ("centred", "standardised", "stains normalised")
PLAIN = (ALONE, "central", "adafed")
OF_LABORATORIES = (
    f"fedavg: {FEDAVG}",
    f"fedavg, twice the steps: {FEDAVG} training.local_epochs=2",
    FEDBN.replace("FedBN", "fedbn", 1),
    WHOLE,
    MEAN_BAND,
)
HARMONISED, DOUBLED = ("HarmoFL, whole", "HarmoFL, mean"), "fedavg, twice the steps"
LABORATORIES = Page(
    "HarmoFL on white blood cells of two laboratories",
    "white blood cells, two laboratories (400 images)",
    "Zheng et al. 2018, segmentation_WBC: 300 images of Jiangxi Tecom (rapid stain, one camera) and 100 of CellaVision "
    "(standard stain, another camera), each of one cell; cytoplasm and nucleus are segmented. No patient is named, so "
    "that an image counts as one. Images of 48 x 48; four tenths train, a tenth validates, half are tested. A small "
    "U-Net with batch norm, 30 rounds of one epoch, all hospitals count alike. Every row has the same network, images "
    "and epochs; central makes as many steps as both laboratories together. HarmoFL's step takes two gradients, "
    "hence the rows with twice the steps. A row whose name ends with a look has images that were changed each by "
    "itself, before anybody trained (`results/looks.py`): the mean of each channel taken off; mean 0 and "
    "deviation 1; Macenko's reference stains by MONAI, which are those of another stain (H&E). AdaFed's runs on "
    "changed images were declared with the others and made when their scores were known.",
    (
        Part(
            "cells",
            "",
            (
                *PLAIN,
                *OF_LABORATORIES,
                *(f"{name}, {look}: algorithm.name={name}" for look in SELF_MADE for name in PLAIN),
                *(row.replace(": ", f", {look}: ", 1) for look in SELF_MADE for row in OF_LABORATORIES),
                STEP,
            ),
            "fedavg",
            "further questions are those of the part 'declared questions', with p corrected for these alone. (1) "
            "HarmoFL gains where it is significantly above fedavg. (2) The gain is the method's where it is also "
            "significantly above fedavg with twice the steps, which has its price, on images as they are and on "
            "centred ones. It is not the method's where the interval's upper end against the latter is below 2 "
            "points. Otherwise it is inconclusive. (3) On changed images HarmoFL adds something where it is "
            "significantly above fedavg with twice the steps on the same images. (4) adafed less fedbn is a negative "
            "control: of two hospitals each weighs the other by 1 - λ = 1/2, whatever their statistics. A significant "
            "difference would mean that the intervals are too narrow. Nothing is tuned; single-site training with "
            "seed 99 chose the number of rounds; one run each of FedBN, AdaFed and HarmoFL with that seed, of 15 "
            "rounds, had been seen",
            plan="results/plans/laboratories.yaml",
            seeds=7,
            later=("adafed", "HarmoFL, step"),
            asked=(
                *((row, base) for base in ("fedavg", DOUBLED, f"{DOUBLED}, centred") for row in HARMONISED),
                *((f"{row}, {look}", f"{DOUBLED}, {look}") for look in SELF_MADE for row in HARMONISED),
                *((row, base) for base in ("fedbn", ALONE) for row in HARMONISED),
                *((f"fedavg, {look}", "fedavg") for look in SELF_MADE),
                ("adafed", "fedbn"),
            ),
            data=CELLS,
        ),
    ),
)

SINGLE, ENSEMBLE = ALONE, "ensemble of local"
OF_TABLES = (
    SINGLE,
    f"fedavg: {FEDAVG}",
    f"{DOUBLED}: {FEDAVG} training.local_epochs={{twice}}",
    FEDBN.replace("FedBN", "fedbn", 1),
    "adafed",
    STEP,
    "ditto: algorithm.name=ditto algorithm.weighting=uniform",
    "fedsm: algorithm.name=fedsm algorithm.weighting=uniform",
)
OF_IMAGES = (*OF_TABLES[:5], WHOLE, MEAN_BAND, *OF_TABLES[6:])


def _differing(name: str, title: str, rows: tuple[str, ...], epochs: int = 1, **more: Any) -> Part:
    return Part(
        name,
        title,
        tuple(row.replace("{twice}", str(2 * epochs)) for row in rows),
        "fedavg",
        "the questions are those of results/contrasts.yaml",
        later=(),
        elsewhere=True,
        **more,
    )


SMALL_NETWORK = (
    "task.size=[32, 48]",
    "task.labels=[hippocampus]",
    "network.features=[8, 16]",
    "training.rounds=12",
    "training.batch_size=4",
    "training.optimizer=adam",
    "training.momentum=0",
    "training.weight_decay=0",
    "training.learning_rate=0.005",
    "participation.sites=[a,b,c,d]",
)


def _stress(kind: str, differs: str) -> Part:
    more = {"plan": "results/plans/laboratories.yaml", "changes": SMALL_NETWORK, "data": VOLUMES, "stress": kind}
    return _differing(kind, f"Hippocampus: {differs}", OF_IMAGES, seeds=4, **more)


WHAT_DIFFERS = Page(
    "Does appearance or structure differ? Methods for either, and ensembles",
    "white blood cells, nuclei, hippocampus, UCI Heart Disease, TCGA-BRCA",
    "Harmonisation (HarmoFL), personalisation (FedBN, AdaFed, Ditto, FedSM), FedAvg, single-site training, and the "
    "mean probabilities of all single-site models, which costs one exchange and no more training than FedAvg. Small "
    "networks, few rounds, one learning rate, nothing tuned, hospitals count alike. Hippocampus: slices of one "
    "hospital's volumes become four hospitals that differ in one way (results/stress.py), 16 slices of each train, 4 "
    "validate, 20 are tested. White blood cells: 32 x 32, half are tested. Nuclei: 48 x 48, each patient is tested "
    "once with every seed (three folds). Tables: as in patients.csv. Learning rate, batches and the powers of gamma of "
    "the hippocampus were changed once, when FedAvg and single-site training with seed 0 had learned next to "
    "nothing, before any other run on them.",
    (
        _differing(
            "cells",
            "White blood cells",
            OF_IMAGES,
            plan="results/plans/laboratories.yaml",
            changes=("task.size=[32, 32]", "training.rounds=10"),
            seeds=4,
            data=CELLS,
        ),
        _differing(HEART, "Heart disease", OF_TABLES, 2, plan="results/plans/heart.yaml", seeds=4, data=HEART),
        _differing(BRCA, "Breast cancer", OF_TABLES[:-1], 2, plan="results/plans/brca.yaml", seeds=4, data=BRCA),
        *(
            _stress(kind, differs)
            for kind, differs in (
                ("gamma", "gamma"),
                ("blur", "blur"),
                ("scale", "size of a pixel"),
                ("structure", "other structures"),
                ("alike", "nothing differs"),
            )
        ),
        _differing(
            "nuclei",
            "Nuclei",
            OF_IMAGES,
            plan="jobs/harmofl/plans/nuclei-small.yaml",
            changes=("task.size=48", "network.features=[8, 16]", "training.rounds=8"),
            seeds=4,
            folds=3,
            data="nuclei_he",
        ),
    ),
)

WEIGHTS = Page(
    "Weights that follow heterogeneity, on 15 studies",
    "IMPACT, 11,022 patients of 15 studies",
    "Real data, not part of this project: IMPACT (traumatic brain injury, six-month mortality, accuracy), from R's "
    "package metamisc. Of every five patients of a study, in the file's order, two train, two are tested and one "
    "validates. All eight covariates, a network of one hidden layer with batch norm, which AdaFed needs, the training "
    "of impact.csv with twice the rounds. All methods have their papers' numbers, and nothing was tuned. FedAvg "
    "weights studies by their patients; beside it stands FedAvg in which all weigh alike.",
    (
        Part(
            IMPACT,
            "",
            (
                "local",
                "fedavg",
                f"fedavg, hospitals alike: {FEDAVG}",
                *("fedce", "fedawa", "feddg-ga", "fedlws", "adafed"),
            ),
            "fedavg",
            "the questions are those of results/contrasts.yaml",
            plan="results/plans/impact.yaml",
            seeds=4,
            later=(),
            elsewhere=True,
            data=IMPACT,
        ),
    ),
)

SYNTHETIC = "Synthetic data: our measurements, not the papers'. "
NUCLEI_SETS = "MoNuSAC 2020, MoNuSeg 2018, TNBC (222 tiles of 94 patients)"

# The pages are in the order in which `all` runs them: pages of real data first, and cheap pages before expensive pages.
PAGES = {
    "study-nuclei": Page(
        "Methods on three public sets of nuclei, with folds",
        NUCLEI_SETS,
        f"{NUCLEI} Tiles of 64 x 64, 12 rounds.",
        (
            Part(
                "nuclei",
                "",
                SEVEN,
                "fedavg",
                SITES_COUNT_ALIKE,
                plan="jobs/harmofl/plans/nuclei-small.yaml",
                changes=("task.size=64", "training.rounds=12"),
                seeds=5,
                folds=5,
                beside=("HarmoFL, whole", ALONE),
                data="nuclei_he",
            ),
        ),
    ),
    "laboratories": LABORATORIES,
    "what-differs": WHAT_DIFFERS,
    "weights": WEIGHTS,
    "patients": Page(
        "All methods on two tables of patients",
        "UCI Heart Disease (four hospitals), TCGA-BRCA (six regions)",
        "Real data, not part of this project: UCI Heart Disease (CC BY 4.0; four hospitals, 13 numbers, accuracy) and "
        "the clinical table of TCGA-BRCA (six regions, 39 numbers, overall survival, concordance index). Test cases "
        "and columns are those of FLamby's protocol (flamby.csv holds its own cells); every "
        "fifth training case of the heart data validates; TCGA-BRCA has too few deaths for that, so nothing is chosen "
        "there. A network of one hidden layer with batch norm, which AdaFed and FedSM need, "
        "the same few epochs and one learning rate for all, no number tuned for any method. HarmoFL is its step "
        "alone: a table has no spectrum. A network with one output has no probabilities to mix, so FedSM's ensemble is "
        "left out, and for survival all of FedSM: risks of two models can't be compared. FedRDN normalises images; "
        "FedRoD needs classes, and FedCE validation cases, so that survival has neither.",
        (
            _patients(HEART, "UCI Heart Disease", "heart", DEAREST[-1:]),
            _patients(BRCA, "TCGA-BRCA: the model after the last round", "brca", (*DEAREST, "fedrod", "fedce")),
        ),
    ),
    "adafed-har": Page(
        "AdaFed on recorded activity of 20 people",
        "UCI HAR, 20 people",
        "UCI HAR smartphone windows (CC BY 4.0), 9 sensors x 128 steps, 6 activities; one person is one site (20 "
        "sites), about 200 training, 50 validation and 80 test windows each. Windows overlap by half, and "
        "training and test windows of a person were drawn at random, so what is tested is much like what was "
        "trained. The paper's training: one local epoch, SGD 0.01 without momentum, batch 32, λ = 0.5; f trained "
        "15 epochs on 20 % of the training windows. 50 rounds; the model after the last one is tested; every "
        "method weighs sites alike.\n\n"
        "The copy of the data that was at hand has time and sensors mixed up (the numbers of [steps, sensors] under "
        "the shape [sensors, steps]); `results/har.py` puts them in order. Numbers that were published "
        "here before were made without that.",
        (
            _har("recorded", "As recorded", None),
            _har("shifted", "With an induced shift: every person's device is mounted and calibrated otherwise", 1),
        ),
    ),
    "adafed-synthetic": Page(
        "AdaFed on synthetic activity",
        "synthetic activity",
        f"{SYNTHETIC}Eight hospitals, eight persons each on average, 40 windows per person; sites 1, 3, 5, 7 wear one "
        "family of sensors and the others another (with `label` all the same). 20 rounds, one local epoch, SGD 0.05 "
        "without momentum, batch 32, λ = 0.5, f trained 15 epochs on 20 % of the training cases; every method weighs "
        "sites alike; the model after the last round is tested. `adafed:weights=uniform` is the control: the same λ "
        "without similarity. No number was tuned for any method.",
        (
            _activity("feature", "Feature shift alone"),
            _activity("both", "Label and feature shift"),
            _activity("label", "Label shift alone"),
        ),
    ),
    "nnunet": Page(
        "nnU-Net over hospitals and at home",
        "synthetic heads, five scanners",
        "GENERATED volumes (`benchmarks/brains.py`): five hospitals whose scanners differ in spacing, intensities, "
        "contrast and noise, 15 FLAIR-like heads with lesions at each, of which 6 train, 3 validate and 6 are tested; "
        "each seed divides them anew. Task `nnunet` trains the 2d configuration of the plans for all 75 "
        "(docs/research/nnunet.md), with a network of 8 features and batches of 4 so that a CPU can; otherwise "
        "nnU-Net's augmentation, loss, schedule and windows, and Dice on the images' own grids. Local is nnU-Net at "
        "home: the same plans and the same number of steps on a hospital's own volumes. Central is nnU-Net on all "
        "volumes in one place, with as many steps as one hospital makes. No number was tuned for any method.",
        (
            Part(
                "nnunet",
                "",
                (ALONE, "central", "fedavg", "fedprox", "ditto", "fedsm"),
                ALONE,
                "whether federated training helps, against nnU-Net at home, is what a hospital asks",
                plan="results/plans/nnunet.yaml",
                seeds=3,
                later=("fedprox", "ditto", "fedsm"),
                beside=("central",),
                data=BRAINS,
            ),
        ),
    ),
    "harmofl-synthetic": Page(
        "HarmoFL on synthetic histology",
        "synthetic histology",
        f"{SYNTHETIC}The appearance shift, five sites with equal weights; the same numbers for all rows, none of them "
        "tuned.",
        (
            Part(
                "histology",
                "",
                HARMOFL,
                "FedAvg",
                SITES_COUNT_ALIKE,
                plan="jobs/harmofl/plans/synthetic.yaml",
                changes=("training.rounds=15", "task.patients=24"),
                later=("+ amplitude, band 0.1", "FedProx", "FedAdam"),
                beside=("HarmoFL, whole",),
            ),
        ),
    ),
    "harmofl-nuclei": Page(
        "HarmoFL's parts on three public sets of nuclei",
        NUCLEI_SETS,
        f"{NUCLEI} Tiles of 64 x 64, 12 rounds.",
        (
            Part(
                "nuclei",
                "",
                HARMOFL,
                "FedAvg",
                SITES_COUNT_ALIKE,
                plan="jobs/harmofl/plans/nuclei-small.yaml",
                changes=("task.size=64", "training.rounds=12"),
                seeds=3,
                folds=5,
                beside=("HarmoFL, whole",),
                data="nuclei_he",
            ),
        ),
    ),
    "controls": Page(
        "Controls for HarmoFL's mean of each channel on nuclei",
        NUCLEI_SETS,
        f"{NUCLEI} Tiles of 64 x 64, 12 rounds. A row whose name ends with a look has pictures that were changed each "
        "by itself, before anybody trained (`results/looks.py`): the mean of each channel taken off; mean 0 "
        "and deviation 1; flat histograms; Macenko's reference stains by MONAI. `medsilo compare` has no such rows; "
        "this page's command makes them. HarmoFL's step takes two gradients, hence the row with twice the steps; the "
        "rates are a third and three times the plan's, for both.",
        (
            Part(
                "nuclei",
                "",
                CONTROLS,
                "HarmoFL, mean",
                "each row is a way to do without the method, at its price or below",
                plan="jobs/harmofl/plans/nuclei-small.yaml",
                changes=("task.size=64", "training.rounds=12"),
                seeds=3,
                later=tuple(title for row in CONTROLS if (title := row.partition(": ")[0]) not in FIRST_CONTROLS),
                folds=5,
                beside=("FedAvg",),
                data="nuclei_he",
            ),
        ),
    ),
    "shift": Page(
        "From which strength of a shift each method helps",
        "synthetic histology, prostate, activity",
        f"{SYNTHETIC}Three made-up differences between hospitals, each in steps from none on, and the method that was "
        "made for it. Small hospitals, images of 32 x 32, small networks, 15 rounds, five seeds. Optimizer and "
        "learning rate are those of the methods' jobs or of their other pages on these tasks; no number was tuned for "
        "any row.",
        (
            *(_look(power) for power in (0.0, 1.0, 2.0)),
            *(_anatomy(power) for power in (0, 1, 2)),
            *(_sensors(power) for power in (0.0, 1.0, 2.0)),
        ),
    ),
    "baselines": Page(
        "Methods on synthetic hospitals",
        "synthetic prostate, activity, histology",
        f"{SYNTHETIC}Three tasks, three hospitals, small networks, few rounds, one learning rate for all and no number "
        "tuned for any method: it shows what a comparison looks like, what it costs and what ten seeds can decide. "
        "Local, Central and the methods with a model of the hospital's own are tested as such: each hospital's own "
        "model on its own test data. Methods that came later are in patients.csv.",
        (
            _synthetic("prostate", "Prostate: what counts as the organ differs", EVERY, "training.rounds=15"),
            _synthetic("activity", "Activity: label and feature shift", EVERY, "training.rounds=10"),
            _synthetic("histology", "Histology: appearance shift", EVERY, "training.rounds=8", "task.patients=24"),
        ),
    ),
    "fedsm-synthetic": Page(
        "FedSM on synthetic prostates",
        "synthetic prostate",
        f"{SYNTHETIC}`synthetic-prostate`, six hospitals. With low similarity the dark ellipsoid is the organ at a and "
        "e and the bright one at the others, so that no single model is right everywhere; with high similarity the "
        "bright one is the organ everywhere. U-Net with instance norm, Adam 0.001, batch 4, one local epoch; selector "
        "as by default. FedSM-extra and the ensemble have the same number of rounds in all, the last third of them "
        "for the selector alone. Nothing was tuned for any method.",
        (_prostate("low"), _prostate("high")),
    ),
}
