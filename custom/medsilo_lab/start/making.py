"""Make a hospital's data set from a folder or a table: find the kind of data, ask questions, count cases, and write
files.
"""

import csv
import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import write_text
from medsilo.core.rounding import Resolution
from medsilo.core.text import counted
from medsilo.core.yaml_text import load_yaml
from medsilo.federation.protection import SHARES
from medsilo.plan import Plan, parse_plan
from medsilo.site.data_set import (
    DataSet,
    DisclosedCounts,
    KnownFile,
    Patients,
    files_of,
    inventory_of,
    read_inventory,
    scan,
)
from medsilo.site.settings import MIN_PATIENTS_PER_METRIC, SCORE_ROUNDING
from medsilo.tasks.case_index import Entry
from medsilo.tasks.columns import read_columns
from medsilo.tasks.own.folder import FolderTask
from medsilo.tasks.own.own_data import OwnFolder
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import SiteData, patients_of
from medsilo.tasks.sources import DataSource
from medsilo.tasks.subgroups import Subgroup
from medsilo.tasks.survey import Survey
from medsilo_lab.report.data_set_page import page_of
from medsilo_lab.start import table_questions
from medsilo_lab.start.choices import Choice, Draft
from medsilo_lab.start.dataset_layout import DatasetLayout, first_sight, text_of
from medsilo_lab.start.folder_questions import (
    HOSPITALS,
    FoundCases,
    found_cases,
    guessed_patients,
    patients_of_headers,
    sight_of,
)
from medsilo_lab.start.questions import DETECTORS, Proposal, Question, Values, listed
from medsilo_lab.start.subgroups import AskedSubgroup, asked_again

# keys of a task whose values may contain names of columns and classes from the data
SPOKEN = ("columns", "target", "time", "event", "labels", "modalities", "signals")
OF_TABLE = "table."  # prefix of answers that change how a table is read
OF_ALL = ("hospitals", "alone", "annotations")  # keys of answers that apply to all tables or all recordings in a folder
LEARNED = {"survival": ("time", "event"), "regression": ("target", "range")}
PAGE = "page.html"
MOST_VALUES = 1000  # questions about a column use at most this number of the column's different values
Ask = Callable[[Question], str]


@dataclass(frozen=True)
class Made:
    data_set: DataSet
    files: list[KnownFile]
    plan: Plan
    data: SiteData
    source: DataSource
    cases: str = ""  # list of all cases as text; empty if file name patterns describe all cases
    reasons: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        self.data_set.write(folder, self.files, self.cases, self.reasons)
        task = self.plan.task
        table = read_columns(self.source.table_file()) if isinstance(task, PatientTable) else None
        write_text(folder / PAGE, page_of(self.data_set, task, self.data, self.source, self.files, table))


@dataclass(frozen=True)
class MadeSets:
    sight: DatasetLayout
    # data set of each hospital; if there is a single hospital, or one table of several hospitals, the only key is ""
    sets: dict[str, Made]

    @property
    def plan(self) -> Plan:
        return parse_plan(load_yaml(text_of((), self.sight.choices.plan)))


@dataclass
class Asked:
    """The answers to questions. The user is asked each question at most once; a question with an earlier answer is not
    asked.
    """

    ask: Ask
    said: Mapping[str, str]
    answers: dict[str, str] = field(default_factory=dict)

    def __call__(self, question: Question, site: str = "") -> str:
        """Return the answer to a question. An earlier answer applies to all hospitals, unless the key of the answer is
        "KEY of SITE". If the answer is invalid, raise DataError.

        `site` is the hospital to which the question refers, or an empty text if there is only one hospital.
        """
        key = f"{question.key} of {site}" if site else question.key
        if key not in self.answers:
            asked = replace(question, key=key, text=f"{site}: {question.text}" if site else question.text)
            answer = self.said.get(key) or self.said.get(question.key) or self.ask(asked)
            question.changes(answer)
            self.answers[key] = answer
        return self.answers[key]


def make_each(
    layout: DatasetLayout,
    ask: Ask,
    before: Path | None = None,
    said: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda size: None,
    floor: int = MIN_PATIENTS_PER_METRIC,
    ready: Path | None = None,
    called: Mapping[str, str] | None = None,
    subgroups: Sequence[AskedSubgroup] = (),
) -> MadeSets:
    """Make the data sets of all hospitals whose data are in a folder, or in a common table.

    Args:
        layout: the folder or the table's file, with the user's options.
        ask: receives a question, and returns the answer or raises an error.
        before: the folder of an earlier version of the data set, or of several hospitals' earlier versions.
        said: answers that the user gave earlier.
        progress: receives the size in bytes of each file that was read.
        floor: numbers of patients are disclosed as multiples of this number (min_patients_per_metric).
        ready: folder for preprocessed images.
        called: names in plans of columns, levels and classes, by their names in the data.
        subgroups: subgroups of patients whose scores may leave the hospital, in addition to those of the earlier
            version.
    """
    asked = Asked(ask, {**({"folders": HOSPITALS} if layout.hospitals else {}), **(said or {})})
    found = found_cases(layout.path, layout.target, asked)
    with TemporaryDirectory() as scratch:
        making = _Making(layout, found, asked, Path(scratch), ready)
        makers = making.makers()
        for maker in makers:
            maker.look(before / maker.name if before and making.several else before, progress)
        _leave_out_copies(makers, asked)
        made = {maker.name: maker.made(floor, called or {}, subgroups) for maker in makers}
    spoken = {word: name for own in made.values() for word, name in own.data_set.called.items()}
    sight = replace(making.sight, choices=called_otherwise(making.sight.choices, spoken)) if spoken else making.sight
    return MadeSets(sight, made if making.several else {"": next(iter(made.values()))})


class _Making:
    def __init__(
        self, layout: DatasetLayout, cases: FoundCases | None, request: Asked, scratch: Path, ready: Path | None
    ) -> None:
        self.layout, self.found, self.asked, self.scratch, self.ready = layout, cases, request, scratch, ready
        self.sight = sight_of(cases, layout) if cases else first_sight(layout)
        self.facts: dict[str, Any] = {}

    @property
    def several(self) -> bool:
        return self.sight.several and "task.partition" not in self.sight.choices.plan

    @property
    def sites(self) -> dict[str, Any]:
        keys = ("sites", "evaluation_sites")
        return (
            {key: own for key in keys if (own := _chosen(self.sight, f"participation.{key}"))}
            if self.several
            else {"sites": [self.layout.site]}
        )

    def makers(self) -> "list[_Maker]":
        """Ask all questions, and return a `_Maker` for each hospital.

        A hospital with very few patients is left out. Answers can change the number of a hospital's patients.
        """
        every: dict[str, _Maker] = {}
        while True:
            sites = self.sites
            names = [name for site in sites.values() for name in site]
            for name in names:
                if name not in every:
                    every[name] = _Maker(self, name)
                    every[name].ask()
            if self.sites == sites:
                return [every[name] for name in names]

    def take(self, site: str, said: Values) -> None:
        """Add the answers that change how a hospital's table is read, and examine the folder again."""
        own = {key: value for key, value in said.items() if key not in OF_ALL}
        more = {key: value for key, value in said.items() if key in OF_ALL}
        of = self.layout.said_of
        if self.several:
            of = {**of, site: {**of.get(site, {}), **own}}
        else:
            more |= own
        target, hospitals = more.pop("target", self.layout.target), more.pop("hospitals", self.layout.hospitals)
        said_of_all = {**self.layout.said, **more}
        self.layout = replace(self.layout, target=target, hospitals=hospitals, said=said_of_all, said_of=of)
        self.sight = first_sight(self.layout)


def _has_images(plan: Plan) -> bool:
    return isinstance(plan.task, OwnFolder)


def _chosen(sight: DatasetLayout, key: str) -> Any:
    return sight.choices.plan.get(key, (None, ""))[0]


def _cases_text(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


class _Maker:
    def __init__(self, making: _Making, name: str) -> None:
        self.making, self.name, self.found, self.asked = making, name, making.found, making.asked
        self.folder: Path | None
        self.folder, self.cases = self._found_cases() if self.found else (None, "")
        self.list = making.scratch / f"{name}.csv"
        self.answers = dict(self.asked.answers)
        self.changes: dict[str, Any] = {}
        self.left_out = dict(self.found.left_out) if self.found and not making.sight.several else {}
        self.data: SiteData | None = None
        self.old: DataSet | None = None
        self.files: list[KnownFile] = []

    def _found_cases(self) -> tuple[Path, str]:
        assert self.found
        segments = self.found.segments
        cases = self.found.sites()[self.name] if self.making.several else self.found.cases
        files = [file for case in cases for file in ([case.image, case.label] if segments else [case.image])]
        tops = {PurePosixPath(file).parts[0] for file in files}
        inner = cases[0].hospital if tops == {cases[0].hospital} else ""

        def within(file: str) -> str:
            return str(PurePosixPath(file).relative_to(inner))

        rows = [(within(own.image), within(own.label) if segments else own.label, own.patient) for own in cases]
        return self.making.layout.path / inner, _cases_text(["image", "label", "patient"], rows)

    def drafted(self) -> dict[str, tuple[Any, str]]:
        draft = self.making.sight.choices
        own = {**draft.settings, **(draft.sites.get(self.name, {}) if self.making.several else {})}
        return {key.removeprefix("data."): said for key, said in own.items() if key.startswith("data.")}

    def place(self) -> Path:
        if self.folder:
            return self.folder
        sight, own = self.making.sight, self.making.sight.choices.sites.get(self.name, {})
        folder = Path(own["data.folder"][0]) if "data.folder" in own else sight.path / self.name
        return folder if self.making.several and "data.table" not in own and folder.is_dir() else sight.path

    def read_as(self) -> tuple[Plan, DataSource]:
        plan_values = load_yaml(text_of((), self.making.sight.choices.plan))
        plan_values["participation"] = dict(self.making.sites)
        plan_values["task"].pop("partition", None)
        data: dict[str, Any] = {key: value for key, (value, _) in self.drafted().items()} | {"folder": self.place()}
        for key, value in self.changes.items():
            where: dict[str, Any] = data
            *path, last = key.split(".")
            for step in path:
                where = where.setdefault(step, {})
            if value is None:
                where.pop(last, None)
            else:
                where[last] = value
        if self.cases:
            self.list.write_text(self.cases, encoding="utf-8")
            data = {key: own for key, own in data.items() if key not in ("images", "labels", "patient", "table")}
            data |= {"table": str(self.list), "columns": self.changes.get("columns") or {}}
        return _read_as(parse_plan(plan_values), data)

    def ask(self) -> None:
        """Ask all questions about the hospital, including questions that only arise from an answer."""
        done = {*self.asked.answers} if self.found else set[str]()
        while True:
            self.seen, self.data = self._proposal(*self.read_as())
            seen = self.seen
            ahead = [question for question in questions_of(seen) if question.key not in done]
            if not ahead:
                said = seen.survey.patients_named and not seen.takes_files_as_patients
                self.known = said and (not self.found or bool(self.found.patients_by))
                return
            question = ahead[0]
            each = self.making.several and bool(seen.columns) and not (question.safe or question.of_all)
            answer = self.asked(question, self.name if each else "")
            done.add(question.key)
            self.answers[question.key] = answer
            changes = question.changes(answer)
            of_table = {
                key.removeprefix(OF_TABLE): change for key, change in changes.items() if key.startswith(OF_TABLE)
            }
            self.changes |= {key: own for key, own in changes.items() if not key.startswith(OF_TABLE)}
            if of_table:
                self.making.take(self.name, of_table)
                if not any(self.name in site for site in self.making.sites.values()):
                    return  # after an answer, the hospital may have too few patients

    def _proposal(self, plan: Plan, source: DataSource) -> tuple[Proposal, SiteData | None]:
        """Return the proposal to which the questions refer, and the hospital's data. If the data were not read, return
        None in place of the data.
        """
        columns: dict[str, tuple[str, ...]] = {}
        if isinstance(plan.task, PatientTable):
            table = read_columns(source.table_file())
            columns = {name: table.column(name).values[:MOST_VALUES] for name in table.names}
        sight, tested = self.making.sight, self.name in plan.participation.evaluation_sites
        own = self._read_once(source.for_study(only_tested=tested), plan)
        data, survey = None, None
        if columns:  # the cases of a table always fit into memory, so they can be read completely
            try:
                data = plan.task.site_data(self.name, plan.participation.sites, 0, own)
                survey = data.survey
            except MedsiloError:
                data = None  # the call of `survey` below reports the reason of the error
        survey = survey or plan.task.survey(self.name, plan.participation.sites, 0, own)
        if stops := [problem for problem in survey.problems if problem.severity == "stops"]:
            raise DataError(stops[0].counted, "; ".join(stops[0].private[:6]))
        told = source.model_dump(exclude_defaults=True)
        return Proposal(sight, plan.task, self.name, told, survey, list(sight.files), columns), data

    def _read_once(self, source: DataSource, plan: Plan) -> DataSource:
        if not _has_images(plan):
            return source
        ready = self.making.ready
        return source.model_copy(update={"cache_folder": ready}) if ready else source.for_facts(self.making.facts)

    def look(self, before: Path | None, progress: Callable[[int], None]) -> None:
        """List the files of the data set. A file that is already listed in the earlier data set (folder `before`) is
        not read again.
        """
        self.old = DataSet.read(before) if before and (before / DataSet.FILE).exists() else None
        known: Mapping[str, KnownFile] = {}
        if before and self.old:
            with suppress(DataError):  # if the earlier inventory is damaged, every file is read
                known = read_inventory(before)
        self.files = scan(files_of(self.read_as()[1]), known, progress)

    def entries(self) -> list[Entry]:
        plan, source = self.read_as()
        if not isinstance(plan.task, FolderTask):
            return []
        entries = plan.task.listing_of(source, source.folder).entries
        return [] if any(image.is_dir() for entry in entries for image in entry.images) else entries

    def keep(self, entries: Sequence[Entry], why: str, patients: int) -> None:
        """Keep the cases in `entries`, and omit all other cases for the reason `why`. `patients` is the number of
        patients of the omitted cases.
        """
        channels, folder = len(entries[0].images), self.place()
        heads = ["image"] if channels == 1 else [f"image-{number}" for number in range(channels)]
        parts = any(entry.part for entry in entries)
        rows = [
            [str(file.relative_to(folder)) for file in entry.images]
            + [str(entry.label.relative_to(folder)) if isinstance(entry.label, Path) else entry.label]
            + [entry.patient, *([entry.part] if parts else [])]
            for entry in entries
        ]
        self.cases = _cases_text([*heads, "label", "patient", *(["part"] if parts else [])], rows)
        self.changes["columns"] = {"image": heads} if channels > 1 else None
        self.left_out[why] = self.left_out.get(why, 0) + patients

    def _subgroups_before(self) -> Mapping[str, Subgroup]:
        return DataSource.from_values(self.old.reading, DataSet.FILE).subgroups if self.old else {}

    def made(self, floor: int, called: Mapping[str, str], subgroups: Sequence[AskedSubgroup] = ()) -> Made:
        plan, source = self.read_as()
        # names in plans by names in the data, from the earlier version of the data set
        before = self.old.called if self.old else {}
        asked, names = asked_again(self._subgroups_before(), subgroups)
        names |= called
        called = {**{word: name for word, name in before.items() if word in plan.task.words}, **called}
        of_plan = {word: name for word, name in called.items() if not asked or word in plan.task.words}
        if of_plan:
            plan, source = renamed(plan, source, of_plan)
            self.data = None  # after columns or classes were renamed, the data must be read again
        tested = self.name in plan.participation.evaluation_sites
        own = self._read_once(source.for_study(only_tested=tested), plan)
        data = self.data or plan.task.site_data(self.name, plan.participation.everyone, 0, own)
        survey = data.survey or self.seen.survey
        people = {name for part in PARTS for name in patients_of(getattr(data, part))}
        found = {own.name: own.found_in(source, source.folder, people, names) for own in asked}
        if unknown := called.keys() - of_plan - {str(word) for own in found.values() for word in own.levels}:
            raise DataError(f"--call {min(unknown)}: this is neither a name in the data nor a level of a subgroup")
        source = source.model_copy(update={"subgroups": found})
        if any(own.table for own in found.values()):
            self.files = scan(files_of(source), {file.name: file for file in self.files})
        words = dict.fromkeys([*plan.task.words, *(word for name, own in found.items() for word in (name, *own.words))])
        reading = source.model_dump(mode="json", exclude_defaults=True)
        if self.cases:
            reading.pop("table")
        sight = self.making.sight
        made = DataSet(
            name=self.name,
            lineage=self.old.lineage if self.old else DataSet.drawn_lineage(),
            made=date.today().isoformat(),
            found=tuple(sight.summary),
            reading=reading,
            cases=hashlib.sha256(self.cases.encode()).hexdigest() if self.cases else None,
            patients=_patients(data, source, self.known, self.found, self.answers),
            hospitals=dict(sight.patients) if sight.several and not self.making.several else {},
            learns=_learns(plan),
            left_out=self.left_out | _counted(survey, "left out"),
            notes=_counted(survey, "note"),
            answers=self.answers,
            called=dict(called),
            tells=_disclosed_counts(data, floor),
            words=tuple(words),
            inventory=inventory_of(self.files),
        )
        reasons = {key: why for key, (_, why) in self.drafted().items() if key in reading}
        return Made(made, self.files, plan, data, source, self.cases, reasons)


def _leave_out_copies(makers: Sequence[_Maker], request: Asked) -> None:
    """Ask about identical images of different patients or different hospitals. If several patients have the same image,
    only the first of these patients is kept.
    """
    owners: defaultdict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    entries = {maker.name: maker.entries() for maker in makers}
    for maker in makers:
        digests = {maker.place() / file.name: file.sha256 for file in maker.files}
        for entry in entries[maker.name]:
            if digest := digests.get(entry.images[0]):
                owners[digest].setdefault((maker.name, entry.patient), entry.name)
    groups = [dict(sorted(several.items())) for _, several in sorted(owners.items()) if len(several) > 1]
    if not groups:
        return
    shown = [" = ".join(f"{site}/{name}" for (site, _), name in several.items()) for several in groups]
    sites = len({site for several in groups for site, _ in several})
    where = f"at {sites} hospitals" if sites > 1 else "of two patients"
    gone: set[tuple[str, str]] = set()
    for several in groups:
        kept = next((own for own in several if own not in gone), None)
        gone |= several.keys() - {kept}
    text = f"{counted(len(groups), 'image')} found again {where}: {listed(shown)}"
    leave = f"leave out {counted(len(gone), 'patient')}, so that each is there once?"
    request(Question("copies", f"{text}; {leave}", {"left out": {}}, safe=True))
    for maker in makers:
        own = entries[maker.name]
        left = {patient for site, patient in gone if site == maker.name}
        kept_entries = [entry for entry in own if entry.patient not in left]
        if left and not kept_entries:
            raise DataError(f"all images of {maker.name} are copies of another hospital's; leave that folder out")
        if left:
            maker.keep(kept_entries, "patients whose images are another patient's or hospital's, too", len(left))


def _read_as(plan: Plan, data: dict[str, Any]) -> tuple[Plan, DataSource]:
    """Convert the hospital's settings to the description of its data, and return the plan and the description. Besides
    the settings, the description contains the outcome, all classes and the default fractions `shares`.
    """
    task, known = plan.task, data.get("label_map", {})
    if isinstance(task, PatientTable):
        data["outcome"] = [data.get("columns", {}).get(outcome, outcome) for outcome in task.outcomes]
        data["learned_as"] = task.kind
    # the description lists every class, even a class with few patients
    if getattr(task, "kind", "") == "classification":
        plain = {label: label for label in map(str, getattr(task, "labels", ())) if label not in known.values()}
        data["label_map"] = {**known, **plain}
    # a task without the key `shares` divides the data by itself
    usual = {"shares": SHARES} if hasattr(task, "shares") else {}
    return plan, DataSource.from_values({**usual, **data, "folder": str(data["folder"])}, "data")


def _called(word: Any, called: Mapping[str, str]) -> Any:
    if isinstance(word, dict):
        return {key: _called(own, called) if key in ("name", "levels") else own for key, own in word.items()}
    return [_called(own, called) for own in word] if isinstance(word, list | tuple) else called.get(word, word)


def called_otherwise(draft: Draft, called: Mapping[str, str]) -> Draft:
    """`called` maps names of columns and classes in the data to names in plans. In the choices for a folder, replace
    each name in the data by its name in plans. Reasons that contain names from the data are removed.
    """
    own = {f"task.{key}" for key in SPOKEN} & draft.plan.keys()
    there = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in called))
    plan = {
        key: Choice(_called(value, called), "" if there.search(why) else why) if key in own else Choice(value, why)
        for key, (value, why) in draft.plan.items()
    }
    return replace(draft, plan=plan)


def renamed(plan: Plan, source: DataSource, called: Mapping[str, str]) -> tuple[Plan, DataSource]:
    """Rename columns and classes in the plan and in the description of the data. `called` maps their names in the
    data to their names in plans. If `called` contains a name that the plan lacks, raise DataError.
    """
    task = plan.task
    if unknown := sorted(called.keys() - {*task.words}):
        raise DataError(
            f"--call {unknown[0]}: the plan does not contain this name; it contains: {', '.join(task.words)}"
        )

    def name(word: Any) -> Any:
        return _called(word, called)

    values = plan.resolved()
    values["task"] |= {key: name(own) for key, own in values["task"].items() if key in SPOKEN}
    if (changed := parse_plan(values)).task.words == task.words:
        raise DataError(f"task {task.name} has fixed names; leave out --call")
    data = source.model_dump(mode="json", exclude_defaults=True)
    for key in ("codes", "spans", "unannotated"):
        if own := data.get(key):
            data[key] = {name(column): value for column, value in own.items()} if isinstance(own, dict) else name(own)
    own_numbers = getattr(task, "numbers", ())
    if own_numbers:
        key = "columns" if isinstance(task, PatientTable) else "recording_columns"
        read = (*getattr(task, "outcomes", ()), *(own_number.name for own_number in own_numbers))
        here = {own: own for own in read if own in called} | data.get(key, {})
        data[key] = {name(plans): own for plans, own in here.items()}
    levels = data.get("levels", {})
    for column in getattr(task, "columns", ()):
        own = {
            word: word for word in column.levels if word in called and word not in levels.get(column.name, {}).values()
        }
        if own or column.name in levels:
            data.setdefault("levels", {}).pop(column.name, None)
            data["levels"][name(column.name)] = {
                here: name(one) for here, one in (own | levels.get(column.name, {})).items()
            }
    data["label_map"] = {own: name(plans) for own, plans in data.get("label_map", {}).items()}
    return changed, DataSource.from_values({key: own for key, own in data.items() if own}, "data")


def _counted(survey: Survey, severity: str) -> dict[str, int]:
    return {problem.what: problem.count for problem in survey.problems if problem.severity == severity}


def _patients(
    data: SiteData, source: DataSource, known: bool, cases: FoundCases | None, answers: Mapping[str, str]
) -> Patients:
    names = [name for part in PARTS for name in patients_of(getattr(data, part))]
    largest = Resolution.over(names, 0, 1)
    column, pattern = source.columns.get("patient"), source.patient
    by = f"column {column!r}" if column else f"the pattern {pattern!r} in names" if pattern else "column 'patient'"
    by = cases.patients_by if cases else by
    said = answers.get("patients", "")
    return Patients(
        known=known,
        by=by if known else f"said by the person who made it: {said or 'nothing'}",
        count=len(set(names)),
        most_cases=largest.largest if names else 0,
    )


def _learns(plan: Plan) -> dict[str, Any]:
    task, of_kind = plan.task, LEARNED.get(getattr(plan.task, "kind", ""), ("labels",))
    kept = (*of_kind, *(["target"] if isinstance(task, PatientTable) and task.kind == "classification" else []))
    told = {key: getattr(task, key) for key in ("kind", *kept) if hasattr(task, key)}
    return {"task": task.name, **{key: [*own] if isinstance(own, tuple) else own for key, own in told.items()}}


def _disclosed_counts(data: SiteData, floor: int) -> dict[Any, DisclosedCounts]:
    """Return the numbers of patients and of cases that the hospital discloses, for training, validation and test."""
    counts = {}
    for part in PARTS:
        names = patients_of(getattr(data, part))
        rounded = Resolution.over(names, SCORE_ROUNDING, floor)
        counts[part] = DisclosedCounts(patients=rounded.counted, cases=rounded.cases)
    return counts


def stop_at_questions(question: Question) -> str:
    """Return the proposed answer if a wrong proposal could do no serious harm. If a wrong proposal could do harm, raise
    MedsiloError with the question.
    """
    if question.safe:
        return question.proposed
    other = " or another answer" if question.free or len(question.answers) > 1 else ""
    raise MedsiloError(
        f"{question.key}: {question.text}; answer with --set '{question.key}={question.proposed}'{other}"
    )


def questions_of(seen: Proposal) -> list[Question]:
    """Return the questions about a proposal. If several questions have the same key, only the first of these questions
    is returned.
    """
    found: dict[str, Question] = {}
    for detector in (*table_questions.DETECTORS, *DETECTORS, guessed_patients, patients_of_headers):
        for question in detector(seen):
            found.setdefault(question.key, question)
    return list(found.values())
