"""Say what lies in a folder, what suits it, and what to do next: the first probe that knows the folder does.

The choices are written as a hospital's medsilo.yaml and a job with its plan, each key with its reason as a comment.
"""

import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_text
from medsilo.core.yaml_text import dump_yaml, load_yaml
from medsilo.flare.jobs import PLAN, write_job
from medsilo.plan import Plan, parse_plan
from medsilo.registry import TASKS, PluginTable
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import make_settings
from medsilo.tasks.case_index import TABLE, CaseIndex
from medsilo.tasks.scans import Scan
from medsilo.tasks.sources import DataSource
from medsilo_lab.start import choices
from medsilo_lab.start.choices import Choices, Draft
from medsilo_lab.start.dataset_facts import DatasetFacts, look_at, look_of, looks_of, opened, patient_in
from medsilo_lab.start.file_table import FileTable, table_of_files
from medsilo_lab.start.fitting import fit_for
from medsilo_lab.start.folder_layout import FolderLayout, by_hospital, items_of, layout_of_folder, sites_of
from medsilo_lab.start.wording import LEAST_NAMED, plans_words

OWN_SHARES = "training, validation, test: at a hospital this decides"
DATASET_PROBES = PluginTable("medsilo.dataset_probes", "types:FunctionType", {})


@dataclass(frozen=True)
class DatasetLayout:
    """A folder that `medsilo init` looks at, with what a dataset probe needs; then with what it found and chose.

    >>> from pathlib import Path
    >>> folder = DatasetLayout(Path("docs"), "st-anna")
    >>> "start/tutorial.md" in folder.files
    True
    >>> folder.by_hospital(["north/well/1.txt", "south/ill/1.txt"])
    {'north': ['north/well/1.txt'], 'south': ['south/ill/1.txt']}
    >>> seen = folder.choose("synthetic-activity", ["9 walks"], {"": 9}, {"task.windows": (8, "few walk far")}, {})
    >>> seen.choices.plan["task.windows"], seen.choices.plan["seed"]
    ((8, 'few walk far'), (0, 'the same seed gives the same numbers'))
    """

    path: Path
    site: str  # this hospital's name, where the folder is one hospital's
    device: str | None = None  # one that was asked for
    gpu: bool = False  # whether this machine trains on one
    by_slices: bool = False  # whether volumes are learned slice by slice, as was asked for
    target: str | None = None  # the column of what is to be learned, where one was asked for
    summary: Sequence[str] = ()  # what lies there, one sentence a line
    several: bool = False  # whether these are several hospitals
    choices: Draft = field(default_factory=lambda: Draft({}, {}))

    by_hospital = staticmethod(by_hospital)
    opened = staticmethod(opened)
    patient_in = staticmethod(patient_in)
    sites_of = staticmethod(sites_of)
    plans_words = staticmethod(plans_words)

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The files below the folder by their path from there, without hidden ones."""
        return CaseIndex.files_below(self.path)[0]

    @cached_property
    def images(self) -> Sequence[str]:
        """The images and masks among the files; a folder that holds one DICOM series ends in a slash."""
        return [item for item in items_of(self.files) if PurePosixPath(item).name != TABLE]

    def table_of(self, named: Collection[str]) -> FileTable | None:
        """Return the table in the folder that names these files, images or recordings."""
        return table_of_files(self.files, named, self.target)

    def folders_of(self, tops: Collection[str]) -> dict[str, Choices]:
        """Return the settings of hospitals whose folders are called otherwise than they."""
        return {
            site: {"data.folder": (str(self.path / top), "its folder is called otherwise than the hospital")}
            for site, top in sites_of(tops).items()
            if site != top
        }

    def choose(
        self,
        task: str,
        found: list[str],
        patients: Mapping[str, int],
        plan: Choices,
        settings: Choices,
        *,
        examples: Mapping[str, float] | None = None,
        sites: Mapping[str, Choices] | None = None,
    ) -> "DatasetLayout":
        """Return the folder with what was found, and a probe's choices beside those that all kinds of data have.

        plan, settings: the keys that the probe knows, each with its value and the reason; they stand in the place of
        usual ones. sites: what only these hospitals' settings say. patients: of each hospital, or {"": 40} of a folder
        that is one hospital's; examples: how many these learn from, where that is not one of each patient.
        """
        if few := len(patients) - len(patients := choices.named_hospitals(patients)):
            found = [*found, f"not in the plan: hospitals of fewer than {LEAST_NAMED} patients ({few})"]
        divided = "shares" in TASKS[task].model_fields  # else the task knows the parts
        shares = choices.shares_of(patients)
        cases = np.median([(examples or patients)[site] for site in choices.trained_of(patients)]) * shares.value[0]
        usual = {
            "algorithm.name": choices.METHOD,
            "task.name": (task, found[0].partition(":")[0]),  # without its counts: a plan is mailed
            **{key: own for key, own in plan.items() if key.startswith("task.") and key not in choices.BEHIND_SHARES},
            **({"task.shares": shares} if divided else {}),
            **choices.steps_of(int(cases), plan.get("training.batch_size", choices.BATCH)),
            **choices.course_of(patients, self.site),
        }
        apart = "" not in patients and not sites and "task.partition" not in plan
        where = "with a folder for each hospital" if apart else "nothing is written there"
        package = TASKS.package_of(task)
        said = {
            "data.folder": (str(self.path), where),
            **settings,
            **({"data.shares": (shares.value, OWN_SHARES)} if divided else {}),
            **({"packages": ([package], f"it brings task {task}: review it")} if package else {}),
            **({"device": (self.device, "as --device asked for")} if self.device else {}),
        }
        small = choices.shares_of_small(patients) if divided else {}
        own = {site: {**(sites or {}).get(site, {}), **small.get(site, {})} for site in patients}
        own = {site: single for site, single in own.items() if single}
        draft = Draft(choices.in_order({**usual, **plan}), choices.in_order(said), own)
        return replace(self, summary=found, several="" not in patients, choices=draft)

    def choose_for_images(
        self,
        task: str,
        kind: str,
        source: DataSource,
        listings: Mapping[str, CaseIndex],
        seen: Callable[[tuple[Path, ...], Path | str], tuple[Scan, np.ndarray]],
        plan: Choices,
        settings: Choices,
    ) -> "DatasetLayout":
        """Return the folder with what was found in volumes with masks that a probe lists itself, and all choices.

        kind: of folder, in words. listings: of each hospital, or of one under "". seen: opens the files of
        an image and of its mask.
        plan, settings: the keys that the probe knows better.
        """
        layout = FolderLayout(kind, hospitals=tuple(filter(None, listings)))
        looks = looks_of(
            layout, source, listings, lambda entry: look_of(*seen(entry.images, entry.label)), segments=True
        )
        return self._of_images(task, looks, plan, settings)

    def _of_images(self, task: str, looks: DatasetFacts, plan: Choices, settings: Choices) -> "DatasetLayout":
        """Return what was found in images; their network suits a GPU or a processor, as this machine has it."""
        dimensions = choices.dimensions_of(looks, self.by_slices)
        axes = dimensions.value if dimensions else 2
        fit, limit = fit_for(looks.segments, axes, self.gpu), LIMITS[self.gpu]
        (labels, label_map), spacing = choices.labels_of(looks), choices.spacing_of(looks, axes)
        of_images = {
            "task.kind": ("segmentation" if looks.segments else "classification", looks.layout.kind),
            "task.labels": labels,
            **choices.channels_of(looks),
            **({"task.dimensions": dimensions} if dimensions else {}),
            **({"task.target_spacing": spacing} if spacing else {}),
            "task.intensity": choices.intensity_of(looks),
            "task.augmentation": choices.augmentation_of(looks),
            **({"training.learning_rate": (0.0005, choices.ADAMS_RATE)} if looks.segments else {}),
            **choices.size_of(looks, fit, spacing, limit),
            **choices.network_of(fit, looks),
            "training.batch_size": (fit.batch, limit),
            **plan,
        }
        slices = 1 if looks.flat or axes == 3 else looks.middle(2)
        examples = {site: count * slices for site, count in looks.cases.items()}
        said = {**choices.settings_of(looks, label_map), **settings}
        own = self.folders_of(looks.layout.hospitals)
        return self.choose(task, looks.summary, looks.patients, of_images, said, examples=examples, sites=own)


LIMITS = {True: "for a GPU of 8 GB", False: "so that a round takes minutes on a processor"}  # by whether there is a GPU


def first_sight(folder: DatasetLayout) -> DatasetLayout:
    """Open some of a folder's files, and choose; a folder that no `medsilo.dataset_probes` knows has images."""
    for name in DATASET_PROBES:
        if (sight := DATASET_PROBES[name](folder)) is not None:
            return sight
    return look(folder)


def look(folder: DatasetLayout) -> DatasetLayout:
    """Say what suits a folder of images; a DataError says what is missing in it."""
    looks = look_at(folder.path, layout_of_folder(folder.path, folder.target))
    return folder._of_images("image-folder" if looks.flat else "nifti-folder", looks, {}, {})


SHOWN = (
    "task.signals",
    "task.rate",
    "task.window",
    "task.size",
    "task.target_spacing",
    "task.intensity",
    "network.name",
    "training.batch_size",
    "data.patient",
)


def shown_lines(draft: Draft) -> list[str]:
    """Return the choices that people ask about first, one line each."""
    own = {**draft.plan, **draft.settings}
    return [f"{key}: {in_yaml(value)}  ({why})" for key, (value, why) in own.items() if key in SHOWN]


def rows(draft: Draft) -> list[tuple[str, str, str, str]]:
    """Return the choices as file, key, value and reason."""
    files = [(f"{JOB}/app/config/plan.yaml", draft.plan), (FILE_NAME, draft.settings)]
    files += [(f"{site}/{FILE_NAME}", own) for site, own in draft.sites.items()]
    return [(file, key, in_yaml(value), why) for file, own in files for key, (value, why) in own.items()]


def advice(several: bool, out: Path, stopped: Sequence[str]) -> list[tuple[str, str]]:
    """Return what to do next: what for, and the command, if there is one.

    several: whether the folder has all hospitals; stopped: those of which the check found what stops the study.
    """
    job = out / JOB
    given = f"--settings {out}"
    steps = [(f"read the reasons in {out / FILE_NAME} and {job}/app/config/plan.yaml, and correct what is wrong", "")]
    if stopped:
        command = f"medsilo check {job} --settings {place_of(out, stopped[0])} --site {stopped[0]}"
        return [(f"settle what the check found at {', '.join(stopped)}, then check again:", command), *steps]
    if several:
        command = f"medsilo compare --plan {job} --methods local,fedavg {given}"
        return [*steps, ("does federated training help these hospitals?", command)]
    return [
        *steps,
        ("train on this machine alone:", f"medsilo run {job} --set algorithm.name=local {given} --engine inprocess"),
        (f"with others: send {job} to the consortium's lead, and put {out / FILE_NAME} into your kit's local/", ""),
    ]


JOB, TRIAL, CHECKS = "job", "trial", "check"
WIDTH = 118
OF_PLAN = (
    "What all hospitals agree on, drafted by 'medsilo init' from one folder: read it, and change what you know better.",
    "'make docs' writes every key to site/reference/keys.html; docs/start/your-data.md has those of the task.",
)
OF_SETTINGS = (
    "What only this hospital decides, drafted by 'medsilo init'. No job and no plan can change it.",
    "Put it into your kit's local/ folder. site_configs/example/medsilo.yaml has every other key.",
)


def refuse_to_overwrite(out: Path, folder: Path) -> None:
    """Raise an error where something of a start is in the way, or where the output would lie among the data."""
    there = [name for name in (FILE_NAME, JOB, TRIAL, CHECKS) if (out / name).exists()]
    if there:
        raise MedsiloError(
            f"{out / there[0]} exists and stays as it is; choose another folder with --out, or remove it"
        )
    if out.resolve().is_relative_to(folder.resolve()):
        raise MedsiloError(
            f"--out {out} lies in the data folder, where nothing is written; give another, like -o ../{out.name}"
        )


def write_start(out: Path, draft: Draft) -> Plan:
    """Write medsilo.yaml, also those of single hospitals, and the job; return its plan. All is checked before."""
    text = text_of(OF_PLAN, draft.plan)
    plan = parse_plan(load_yaml(text))
    texts = {FILE_NAME: text_of(OF_SETTINGS, draft.settings)}
    texts |= {f"{site}/{FILE_NAME}": text_of(OF_SETTINGS, draft.settings_of(site)) for site in draft.sites}
    for name, own in texts.items():
        make_settings(load_yaml(own), name)
    write_job(out / JOB, plan)
    write_text(out / JOB / PLAN, text)
    for name, own in texts.items():
        write_text(out / name, own)
    return plan


def place_of(out: Path, site: str) -> Path:
    """Return the folder with a hospital's settings: its own, or that of all."""
    return out / site if (out / site / FILE_NAME).exists() else out


def text_of(head: Sequence[str], own: Choices) -> str:
    """Return a file of YAML with the reasons of its choices."""
    lines = [f"# {line}" for line in head]
    for section, keys in groupby(own, key=lambda key: key.rpartition(".")[0]):
        lines += ["", *([f"{section}:"] if section else [])]
        lines += _rows({key.rpartition(".")[2]: own[key] for key in keys}, "  " if section else "")
    return "\n".join(lines) + "\n"


def _rows(own: Choices, indent: str) -> list[str]:
    """Return a section's lines; a reason is behind its key, or above it where both are too long for a line."""
    texts = [(f"{indent}{key}: {in_yaml(value)}", why) for key, (value, why) in own.items()]
    width = max((len(text) for text, why in texts if len(text) + len(why) + 4 <= WIDTH), default=0)
    lines: list[str] = []
    for text, why in texts:
        beside = f"{text:{width}}  # {why}" if why else text
        if len(beside) <= WIDTH:
            lines.append(beside)
        else:
            lines += [*(f"{indent}# {line}" for line in textwrap.wrap(why, WIDTH - len(indent) - 2)), text]
    return lines


def in_yaml(value: Any) -> str:
    """Return a value in one line of YAML."""
    return dump_yaml([value], in_line=True)[1:-2]  # within a list, where it needs quotes also for a comma
