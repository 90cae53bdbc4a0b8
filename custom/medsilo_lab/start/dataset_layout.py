"""Find out which kind of data a folder contains, and propose a plan and the next commands. The first dataset probe that
matches the folder makes the proposal.

This module also writes the proposal: a medsilo.yaml for each hospital, and a job with the plan. In the plan and in each
medsilo.yaml, a comment gives the reason for each key.
"""

import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import write_text
from medsilo.core.text import safe_name
from medsilo.core.yaml_text import dump_yaml, load_yaml
from medsilo.flare.job_source import PLAN
from medsilo.plan import Plan, parse_plan
from medsilo.registry import TASKS, PluginTable
from medsilo.site.data_set import DataSet
from medsilo.site.party import FILE_NAME
from medsilo.tasks.case_index import TABLE, CaseIndex
from medsilo.tasks.scans import Scan
from medsilo.tasks.scored_together import Classifying
from medsilo.tasks.sources import DataSource
from medsilo_lab.jobs import write_job
from medsilo_lab.start import choices
from medsilo_lab.start.choices import Choices, Draft
from medsilo_lab.start.dataset_facts import DatasetFacts, dataset_facts_of, look_at, look_of, opened, patient_in
from medsilo_lab.start.file_table import FileTable, table_of_files
from medsilo_lab.start.fitting import fit_for
from medsilo_lab.start.folder_layout import (
    TELL,
    FolderLayout,
    by_hospital,
    items_of,
    layout_of_folder,
    sites_of,
)
from medsilo_lab.start.wording import LEAST_NAMED, names_a_person, plans_words

OWN_SHARES = "training, validation, test: at a hospital this decides"
DATASET_PROBES = PluginTable("medsilo.dataset_probes", "types:FunctionType", {})


@dataclass(frozen=True)
class DatasetLayout:
    """A folder that `medsilo init` examines. A dataset probe receives a `DatasetLayout`, and returns a copy to which
    the probe's results are added.

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
    site: str  # name of the hospital, if the folder belongs to one hospital
    device: str | None = None  # device that the user requested
    gpu: bool = False  # true if this machine has a GPU for training
    by_slices: bool = False  # true if the user requests slices instead of volumes
    target: str | None = None  # column of the label, if the user named it
    hospitals: bool = False  # true if the user declared that each folder or table belongs to a hospital
    # the user's answers that apply to all tables (their keys are in table_folder.SAID), or to annotations of recordings
    said: Mapping[str, Any] = field(default_factory=dict)
    # the user's answers about columns of one hospital's table, for each hospital
    said_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    facts: Any = None  # facts that the dataset probe found; later questions to the user depend on these facts
    summary: Sequence[str] = ()
    several: bool = False
    patients: Mapping[str, int] = field(default_factory=dict)
    choices: Draft = field(default_factory=lambda: Draft({}, {}))

    by_hospital = staticmethod(by_hospital)
    opened = staticmethod(opened)
    patient_in = staticmethod(patient_in)
    plans_words = staticmethod(plans_words)

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The visible files below the folder, by their relative paths."""
        return CaseIndex.files_below(self.path)[0]

    @cached_property
    def images(self) -> Sequence[str]:
        """The paths of all images and masks. The path of a DICOM series is the path of the folder of the series, and
        ends in a slash.
        """
        return [item for item in items_of(self.files) if PurePosixPath(item).name != TABLE]

    def table_of(self, named: Collection[str], labelled: bool = True) -> FileTable | None:
        """Find a table in the folder whose lines name the given images or recordings. If `labelled` is true, the table
        must have a label column.
        """
        return table_of_files(self.files, named, self.target, labelled)

    def sites_of(self, tops: Collection[str]) -> dict[str, str]:
        """Return a dictionary with the folder of each hospital; the keys are the hospitals' names in the plan."""
        return sites_of(tops, self.hospitals)

    def folders_of(self, tops: Collection[str]) -> dict[str, Choices]:
        """For each hospital whose folder has a different name from the hospital in the plan, return the setting
        `data.folder`.
        """
        return {
            site: {"data.folder": (str(self.path / top), "its folder is called otherwise than the hospital")}
            for site, top in self.sites_of(tops).items()
            if site != top
        }

    def _is_renamed(self, site: str) -> bool:
        there = [] if self.path.is_file() else [*self.path.iterdir()]
        return bool(there) and site not in {safe_name(own) for item in there for own in (item.name, item.stem)}

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
        """Return a copy of this object with the results of a dataset probe. The probe's choices have priority over the
        default choices.

        Args:
            found: the results in sentences
            patients: number of patients by hospital, or {"": 40} for a single hospital
            plan: the probe's choices for the plan: a value and its reason for each key
            settings: the probe's choices for the hospitals' settings
            examples: number of cases by hospital, if a patient may have several cases
            sites: choices for single hospitals
        """
        _refuse_people(plan, patients)
        everybody, patients = patients, choices.named_hospitals(patients)
        if few := len(everybody) - len(patients):
            if (
                not self.hospitals
                and "task.partition" not in plan
                and any(map(self._is_renamed, everybody.keys() - patients.keys()))
            ):
                raise DataError(f"folders or tables of fewer than {LEAST_NAMED} cases may belong to patients; {TELL}")
            found = [*found, f"not in the plan: hospitals of fewer than {LEAST_NAMED} patients ({few})"]
        if "task.partition" not in plan and any(map(self._is_renamed, filter(None, patients))):
            found = [
                *found,
                "hospital-1 and so on may be people: --hospitals names them as their folders",
            ]
        # a task without the key `shares` decides itself how to divide the data
        divided = "shares" in TASKS[task].model_fields
        kind, _ = plan.get("task.kind", ("classification", ""))
        if issubclass(TASKS[task], Classifying) and kind == "classification" and "task.labels" in plan:
            plan = choices.with_score(plan)
        shares = choices.shares_of(patients)
        cases = np.median([(examples or patients)[site] for site in choices.trained_of(patients)]) * shares.value[0]
        usual = {
            "algorithm.name": choices.METHOD,
            # other hospitals receive the plan, so the plan's comment leaves out the numbers of the summary
            "task.name": (task, found[0].partition(":")[0]),
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
        return replace(self, summary=found, several="" not in patients, patients=patients, choices=draft)

    def choose_for_images(
        self,
        task: str,
        kind: str,
        source: DataSource,
        listings: Mapping[str, CaseIndex],
        seen: Callable[[tuple[Path, ...], Path | str], tuple[Scan, np.ndarray]],
        plan: Choices,
        settings: Choices,
        tops: Sequence[str] = (),
    ) -> "DatasetLayout":
        """Return a copy of this object for a folder of volumes with masks, with the properties of the volumes and the
        choices that suit them.

        Args:
            kind: description of the kind of folder
            listings: the cases that a probe found, by hospital; a single hospital has the key ""
            seen: opens an image and its mask
            plan: the probe's choices for the plan
            settings: the probe's choices for the hospitals' settings
            tops: the hospitals' folders
        """
        layout = FolderLayout(kind, hospitals=tuple(tops))
        facts = dataset_facts_of(
            layout, source, listings, lambda entry: look_of(*seen(entry.images, entry.label)), segments=True
        )
        return self._of_images(task, facts, plan, settings)

    def choose_for(self, facts: DatasetFacts) -> "DatasetLayout":
        """Return a copy of this object with the properties of the images, and with choices for images."""
        return self._of_images("image-folder" if facts.flat else "nifti-folder", facts, {}, {})

    def _of_images(self, task: str, facts: DatasetFacts, plan: Choices, settings: Choices) -> "DatasetLayout":
        dimensions = choices.dimensions_of(facts, self.by_slices)
        axes = dimensions.value if dimensions else 2
        fit, limit = fit_for(facts.segments, axes, self.gpu), LIMITS[self.gpu]
        (labels, label_map), spacing = choices.labels_of(facts), choices.spacing_of(facts, axes)
        of_images = {
            "task.kind": ("segmentation" if facts.segments else "classification", facts.layout.kind),
            "task.labels": labels,
            **choices.channels_of(facts),
            **({"task.dimensions": dimensions} if dimensions else {}),
            **({"task.target_spacing": spacing} if spacing else {}),
            "task.intensity": choices.intensity_of(facts),
            "task.augmentation": choices.augmentation_of(facts),
            **({"training.learning_rate": (0.0005, choices.ADAMS_RATE)} if facts.segments else {}),
            **choices.size_of(facts, fit, spacing, limit),
            **choices.network_of(fit, facts),
            "training.batch_size": (fit.batch, limit),
            **plan,
        }
        slices = 1 if facts.flat or axes == 3 else facts.middle(2)
        examples = {site: count * slices for site, count in facts.cases.items()}
        said = {**choices.settings_of(facts, label_map), **settings}
        own = self.folders_of(facts.layout.hospitals)
        return self.choose(task, facts.summary, facts.patients, of_images, said, examples=examples, sites=own)


def _refuse_people(plan: Choices, sites: Iterable[str]) -> None:
    """Raise DataError if a value in the plan looks like a person's name, or if the name of a hospital looks like a
    person's name.
    """
    values = [own for key, (value, _) in plan.items() if key.startswith("task.") for own in _texts(value)]
    if people := [text for text in [*values, *sites] if names_a_person(text)]:
        told = "names of hospitals, classes, structures or channels look like people's; call them otherwise"
        raise DataError(told, private=", ".join(people))


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return _texts(list(value.values()))
    return [value] if isinstance(value, str) else [*chain(*map(_texts, value))] if isinstance(value, list) else []


# the reason for the maximum input size, on a machine with a GPU (True) or without a GPU (False)
LIMITS = {True: "for a GPU of 8 GB", False: "so that a round takes minutes on a processor"}


def first_sight(folder: DatasetLayout) -> DatasetLayout:
    """Examine a folder with the dataset probes in `medsilo.dataset_probes`, and propose a plan. If no probe matches the
    folder, examine the folder as a folder of images.
    """
    for name in DATASET_PROBES:
        if (sight := DATASET_PROBES[name](folder)) is not None:
            return sight
    return look(folder)


def look(folder: DatasetLayout) -> DatasetLayout:
    """Propose a plan for a folder of images; raise DataError if images or labels are missing."""
    return folder.choose_for(look_at(folder.path, layout_of_folder(folder.path, folder.target, folder.hospitals)))


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
    own = {**draft.plan, **draft.settings}
    return [f"{key}: {in_yaml(value)}  ({why})" for key, (value, why) in own.items() if key in SHOWN]


def rows(draft: Draft) -> list[tuple[str, str, str, str]]:
    files = [(f"{JOB}/app/config/plan.yaml", draft.plan), (f"{DATA_SET}/{DataSet.FILE}", _of_data(draft.settings))]
    files += [(f"{DATA_SET}/{site}/{DataSet.FILE}", _of_data(own)) for site, own in draft.sites.items()]
    files += [(FILE_NAME, _of_data(draft.settings, False))]
    return [(file, key, in_yaml(value), why) for file, own in files for key, (value, why) in own.items()]


def _of_data(choices: Choices, whether: bool = True) -> Choices:
    """If `whether` is true, return the choices for the keys that begin with `data.`; otherwise, return the choices for
    all other keys.
    """
    return {key: choice for key, choice in choices.items() if key.startswith("data.") == whether}


def advice(several: bool, out: Path, stopped: Sequence[str]) -> list[tuple[str, str]]:
    """Return the next steps for the user, each with a purpose and a command; the command may be empty.

    `several` is true if the folder contains all hospitals. `stopped` contains the hospitals at which 'medsilo check'
    found an obstacle.
    """
    job = out / JOB
    given = f"--settings {out}"
    steps = [(f"read the reasons in {out / DATA_SET} and {job}/app/config/plan.yaml, and correct what is wrong", "")]
    if stopped:
        command = f"medsilo check {job} --settings {place_of(out, stopped[0])} --site {stopped[0]}"
        return [(f"settle what the check found at {', '.join(stopped)}, then check again:", command), *steps]
    if several:
        command = f"medsilo compare --plan {job} --methods {','.join(COMPARED)} {given}"
        return [*steps, ("does federated training help these hospitals?", command)]
    return [
        *steps,
        ("train on this machine alone:", f"medsilo run {job} --set algorithm.name=local {given} --engine inprocess"),
        (
            f"with others: send {job} to the consortium's lead, read {out / DATA_SET / DataSet.FILE}, and accept it:",
            f"medsilo data accept {out / DATA_SET} --by 'A. PERSON'",
        ),
    ]


JOB, TRIAL, CHECKS, DATA_SET = "job", "trial", "check", "data-set"
COMPARED = ("local", "fedavg")
WIDTH = 118
OF_PLAN = (
    "What all hospitals agree on, drafted by 'medsilo init' from one folder: read it, and change what you know better.",
    "'medsilo docs KEY' explains a key, and 'medsilo docs start/your-data' those of the task.",
)
OF_SETTINGS = (
    "For trying out on this machine (--settings), written by 'medsilo init'. How the data are read is in data.yaml of",
    "the data set. Before a kit takes it, a person reads and accepts it: medsilo docs start/data-set",
)


def refuse_to_overwrite(out: Path, folder: Path) -> None:
    """Raise MedsiloError if the output would overwrite files or be inside the data folder."""
    there = [name for name in (FILE_NAME, JOB, TRIAL, CHECKS, DATA_SET) if (out / name).exists()]
    if there:
        raise MedsiloError(
            f"{out / there[0]} exists, and medsilo does not overwrite it; choose another --out, or remove it"
        )
    if out.resolve().is_relative_to(folder.resolve()):
        raise MedsiloError(
            f"--out {out} is inside the data folder, which medsilo never changes; choose another, like -o ../{out.name}"
        )


class Written(Protocol):
    def write(self, folder: Path) -> None:
        """Write the data set into a folder."""


def write_start(out: Path, draft: Draft, sets: Mapping[str, Written]) -> Plan:
    """Write the data sets, the job, and a medsilo.yaml with which the user may try each data set. Return the plan.

    For a single hospital, `sets` has the key "".
    """
    text = text_of(OF_PLAN, draft.plan)
    plan = parse_plan(load_yaml(text))
    for site, own in sets.items():
        place = out / DATA_SET / site
        own.write(place)
        said = {"data": (str(place.resolve()), "the data set"), **_of_data(draft.settings, False)}
        write_text(out / site / FILE_NAME, text_of(OF_SETTINGS, said))
    if "" not in sets:
        write_text(out / FILE_NAME, text_of(OF_SETTINGS, _of_data(draft.settings, False)))
    write_job(out / JOB, plan)
    write_text(out / JOB / PLAN, text)
    return plan


def place_of(out: Path, site: str) -> Path:
    """Return the folder that contains the hospital's medsilo.yaml: the hospital's folder in `out`, or `out` if there is
    only one hospital.
    """
    return out / site if (out / site / FILE_NAME).exists() else out


def text_of(head: Sequence[str], choices: Choices) -> str:
    lines = [f"# {line}" for line in head]
    for section, keys in groupby(choices, key=lambda key: key.rpartition(".")[0]):
        lines += ["", *([f"{section}:"] if section else [])]
        lines += _rows({key.rpartition(".")[2]: choices[key] for key in keys}, "  " if section else "")
    return "\n".join(lines) + "\n"


def _rows(choices: Choices, indent: str) -> list[str]:
    """Return the lines of a YAML section. Each key's reason is a comment after the value; if the line would be too
    long, the comment is above the key.
    """
    texts = [(f"{indent}{key}: {in_yaml(value)}", why) for key, (value, why) in choices.items()]
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
    return dump_yaml([value], in_line=True)[1:-2]  # YAML quotes a text with a comma only inside a list
