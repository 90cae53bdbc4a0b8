"""`medsilo init` on tables: the roles of columns, the columns that hospitals share, and a first trained model."""

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from medsilo.cli import main
from medsilo.core.errors import DataError
from medsilo.plan import load_plan
from medsilo.site.data_set import DataSet
from medsilo.site.settings import SiteSettings
from medsilo.tasks.columns import read_columns
from medsilo.tasks.table_reader import TableReader
from medsilo_lab.start.choices import Draft
from medsilo_lab.start.dataset_layout import DatasetLayout, first_sight, write_start
from medsilo_lab.start.making import MadeSets, make_each, stop_at_questions
from medsilo_lab.study.verdict_file import read_verdict
from tests.conftest import over_all
from tests.hospital import photograph, write_pixels
from tests.layouts import nested
from tests.unit.medsilo_lab.test_provision import kits_of

HEAD = ["nr", "pid", "alter", "größe", "stadium", "note", "time", "status"]


def rows(count: int, seed: int) -> list[list[Any]]:
    drawn = np.random.default_rng(seed)
    age = drawn.normal(60, 10, count).round(1)
    times = (1000 * np.exp(-(age - 60) / 10) * drawn.uniform(0.8, 1.2, count)).round()
    return [
        [
            n,
            f"P{seed}-{n}",
            age[n],
            drawn.integers(150, 190),
            ["früh", "spät"][n % 2],
            f"text {n}",
            times[n],
            1 + n % 3 % 2,
        ]
        for n in range(count)
    ]


def write(path: Path, head: Sequence[str], lines: Sequence[Sequence[Any]], coding: str = "utf-8", **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=coding) as file:
        csv.writer(file, **how).writerows([head, *lines])
    return path


LINES = ("--set", "patients=each line is a patient")


def begun(folder: Path, study: Path, *more: str) -> int:
    return main(["init", str(folder), "-o", str(study), "--no-train", "--device", "cpu", *more])


def made(folder: Path, **said: str) -> MadeSets:
    layout = DatasetLayout(folder, "hospital-a", "cpu")
    return make_each(layout, stop_at_questions, said={"patients": "each line is a patient", **said})


def drafted(folder: Path) -> Draft:
    sight = first_sight(DatasetLayout(folder, "hospital-a"))
    return sight.choices


def not_read(folder: Path) -> list[tuple[str, str]]:
    lines = first_sight(DatasetLayout(folder, "hospital-a")).summary
    return re.findall(r"^not read: (.+?) \((.*)\)$", "\n".join(lines), re.MULTILINE)


def test_a_table_is_told_by_its_columns(tmp_path: Path) -> None:
    write(tmp_path / "export.csv", HEAD, rows(40, 0), "cp1252", delimiter=";")
    draft = drafted(tmp_path)
    task, data = nested(draft.plan)["task"], nested(draft.settings)["data"]
    assert (task["name"], task["kind"], task["time"], task["event"]) == ("table", "survival", "time", "status")
    assert task["columns"] == ["alter", "größe", {"name": "stadium", "levels": ["früh", "spät"]}]
    assert data["table"] == "export.csv" and data["columns"] == {"patient": "pid"}
    assert data["label_map"] == {1: "censored", 2: "event"}
    assert nested(draft.plan)["participation"]["sites"] == ["hospital-a"]


@pytest.mark.parametrize("column", [0, 1])
def test_what_a_line_of_totals_counts_is_no_class(tmp_path: Path, column: int) -> None:
    """In earlier versions, the total in a last line "Summe" (sum) became a third class."""
    lines = [[f"P{n}", "NordSued"[n % 2 * 4 :][:4], 40 + n % 37, ["nein", "ja"][n % 3 == 0]] for n in range(90)]
    totals = ["", "", "", "30"]
    totals[column] = "Summe"
    head = ["pid", "klinik", "alter", "verstorben"]
    write(tmp_path / "export.csv", head[column:], [line[column:] for line in (*lines, totals)])
    found = made(tmp_path, research="hospitals", **({"patients": "each line is a patient"} if column else {}))
    assert nested(found.sight.choices.plan)["task"]["labels"] == ["nein", "ja"]
    (one,) = found.sets.values()
    assert one.data_set.left_out == {"lines have no patient, or are totals; fill it in, or remove them": 1}


def test_hospitals_with_other_names_of_columns_agree_on_what_they_have_alike(tmp_path: Path) -> None:
    write(tmp_path / "north.csv", HEAD, rows(60, 1))
    other = ["id", "alter", "größe", "rfstime", "death", "year"]
    write(
        tmp_path / "south.csv",
        other,
        [[n, 50 + n % 30, ["<150", ">"][n % 2], 100 + 7 * n % 50, n % 2, 1990] for n in range(60)],
    )
    draft = drafted(tmp_path)
    # The proposed plan leaves out a column that is numeric at one hospital and categorical at another hospital.
    assert nested(draft.plan)["task"]["columns"] == ["alter"]
    south = {key: value for key, (value, _) in draft.sites["south"].items()}
    named = {name: south["data.columns"][name] for name in ("time", "status")}
    assert named == {"time": "rfstime", "status": "death"} and south["data.table"] == "south.csv"
    found = made(tmp_path, event="2", telling="keep them")
    plan = write_start(tmp_path / "study", found.sight.choices, found.sets)
    assert plan.participation.sites == ("north", "south") and (tmp_path / "study/south/medsilo.yaml").is_file()
    assert found.sets["south"].data_set.reading["outcome"] == ["rfstime", "death"]


def test_a_column_deals_hospitals_and_small_ones_are_only_tested(tmp_path: Path) -> None:
    sizes = {"a": 30, "b": 18, "c": 6, "d": 2}
    lines = [[n, site, n % 7, n % 2] for site, size in sizes.items() for n in range(size)]
    write(tmp_path / "all.csv", ["age", "hospital", "dose", "outcome"], lines)
    draft = drafted(tmp_path)
    who, task = nested(draft.plan)["participation"], nested(draft.plan)["task"]
    assert (who["sites"], who["evaluation_sites"], task["partition"]) == (["a", "b"], ["c"], {"kind": "column"})
    assert task["labels"] == ["no", "yes"] and nested(draft.settings)["data"]["label_map"] == {0: "no", 1: "yes"}
    assert task["shares"] == [0.6, 0.2, 0.2] and "'d'" not in str(draft), "two patients name no group"
    assert {site: own["data.shares"][0] for site, own in draft.sites.items()} == {"b": [0.44, 0.28, 0.28]}


@pytest.mark.parametrize("name", ["Zentrum", "Krankenhaus", "Hôpital", "Centro", "Szpital"])
def test_a_column_of_hospitals_is_no_input_in_other_languages(name: str, tmp_path: Path) -> None:
    lines = [[n, site, n % 7, n % 2] for site in ("north", "south") for n in range(30)]
    write(tmp_path / "all.csv", ["age", name, "dose", "outcome"], lines)
    plan = nested(drafted(tmp_path).plan)
    assert plan["participation"]["sites"] == ["north", "south"] and plan["task"]["columns"] == ["age", "dose"]
    write(tmp_path / "all.csv", ["age", name, "dose", "outcome"], [[n, f"Köln {m}", 1, n % 2] for n, m, *_ in lines])
    assert nested(drafted(tmp_path).plan)["participation"]["sites"] == ["Koeln-north", "Koeln-south"]


def test_a_hospital_may_have_one_class_of_what_others_learn(tmp_path: Path) -> None:
    for site, classes in (("a", 2), ("healthy", 1)):
        write(tmp_path / f"{site}.csv", ["age", "dose", "outcome"], [[n % 50, n % 7, n % classes] for n in range(60)])
    task = nested(drafted(tmp_path).plan)
    assert task["task"]["labels"] == ["no", "yes"] and task["participation"]["sites"] == ["a", "healthy"]
    (tmp_path / "a.csv").unlink()
    with pytest.raises(DataError, match="one value at most"):
        drafted(tmp_path)


def test_tables_of_other_programs_are_read_alike(tmp_path: Path) -> None:
    lines = [["anna", 1.5, "ä"], ["bert", 2.5, "ö"]]
    csv_file = write(tmp_path / "a.csv", ["who", "dose", "kind"], lines)
    expected = TableReader.first_lines(csv_file, 9)
    spaced = write(tmp_path / "spaced.csv", ["who", "dose", "kind"], lines, delimiter=" ")
    assert TableReader.first_lines(spaced, 9) == expected
    for coding in ("cp1252", "utf-16"):
        assert (
            TableReader.first_lines(write(tmp_path / f"{coding}.csv", ["who", "dose", "kind"], lines, coding), 9)
            == expected
        )
    pandas.DataFrame(lines, columns=["who", "dose", "kind"]).to_stata(
        tmp_path / "a.dta", write_index=False, version=118
    )
    assert TableReader.first_lines(tmp_path / "a.dta", 9) == expected
    pandas.DataFrame(lines, columns=["who", "dose", "kind"]).to_parquet(tmp_path / "a.parquet")
    assert TableReader.first_lines(tmp_path / "a.parquet", 9) == expected
    (tmp_path / "b.dta").write_bytes(b"no table")
    with pytest.raises(DataError, match="can't be read; export it again"):
        TableReader.first_lines(tmp_path / "b.dta", 9)


@pytest.mark.parametrize(
    ("head", "lines", "words"),
    [
        (["1.0", "2.0"], [[1, 2]] * 9, "numbers in the first line"),
        (["age", "label", "age"], [[n, n % 2, n] for n in range(30)], "2 columns 'age'"),
        (
            [*map("c{}".format, range(2000)), "label"],
            [[1] * 2000 + [n % 2] for n in range(30)],
            r"c19 \(has one value at most.*\)$",
        ),
        (["age", "dose"], [[n, n % 5] for n in range(30)], "which column of x.csv to learn"),
        (
            ["hospital", "age", "outcome"],
            [[("st anna", "st-anna")[n % 3 % 2], n % 9, n % 2] for n in range(30)],
            "can't be a hospital's name",
        ),
    ],
)
def test_what_a_table_lacks_is_said(head: list[str], lines: list[list[Any]], words: str, tmp_path: Path) -> None:
    write(tmp_path / "x.csv", head, lines)
    with pytest.raises(DataError, match=words):
        drafted(tmp_path)


@pytest.mark.slow
def test_from_tables_to_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands lead from hospitals' tables to a report; one of the hospitals has only three patients."""
    for site, count in (("a", 40), ("b", 45), ("c", 3)):
        write(tmp_path / f"data/{site}/export.csv", HEAD, rows(count, count))
    monkeypatch.chdir(tmp_path)
    assert begun(Path("data"), Path("study"), "--set", "event=2") == 0
    assert load_plan(Path("study/job/app/config/plan.yaml")).participation.everyone == ("a", "b")
    command = "compare --plan study/job --methods local,fedavg --settings study --at-once 1 -o out"
    assert main([*command.split(), "--set", "training.rounds=1"]) == 0
    verdict = read_verdict(Path("out"))
    assert Path("out/report.html").is_file() and verdict.first and len(verdict.seeds) == 4


def test_a_hospital_with_a_kit_of_another_name_is_told_how_to_check_its_own_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # `check` writes the names of faulty files into the current folder
    kits_of(tmp_path)
    kit, study = tmp_path / "kits/north", tmp_path / "study"
    write(tmp_path / "data/export.csv", HEAD, rows(40, 1))
    assert begun(tmp_path / "data", study, "--set", "event=2") == 0
    assert load_plan(study / "job/app/config/plan.yaml").participation.resume == 3
    check, own = ["check", str(study / "job"), "--kit", str(kit)], "participation.sites=[north]"
    capsys.readouterr()
    assert main(check) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "the job names hospital-a, not north" in told and f"--set '{own}'" in told
    main([*check, "--set", own])
    told = capsys.readouterr().out
    assert "the job names" not in told and "participation.sites" in told


def test_patients_who_are_sorted_by_their_label_are_no_recording(tmp_path: Path) -> None:
    """A table sorted by its label is no recording, because in a recording, each label occurs in several stretches."""
    drawn = np.random.default_rng(0)
    found = []
    for name, labels in (("patients", ["a", "b", "c"]), ("steps", ["a", "b", "c", "a"])):
        lines = [[*drawn.normal(0, 1, 3).round(3), label] for label in np.repeat(labels, 40)]
        for site in ("north", "south", "east", "west", "centre"):
            write(tmp_path / name / f"{site}.csv", ["x", "y", "z", "label"], lines)
        found.append(nested(drafted(tmp_path / name).plan)["task"]["name"])
    assert found == ["table", "series-folder"]


def test_points_between_thousands_beside_a_decimal_comma_are_no_category(tmp_path: Path) -> None:
    lines = [[f"1.{300 + n}", f"1.{300 + n},5", n % 2] for n in range(40)]
    write(tmp_path / "cases.csv", ["pid", "leukocytes", "outcome"], lines, delimiter=";")
    choices = drafted(tmp_path)
    assert choices.plan["task.columns"][0] == ["leukocytes"] and choices.settings["data.decimal"][0] == ","
    # numbers in English format, without decimal commas
    lines = [[f"P{n}", f"1,{300 + n}.5", f"{n}.5", n % 2] for n in range(40)]
    write(tmp_path / "cases.csv", ["pid", "leukocytes", "crea", "outcome"], lines, delimiter=";")
    choices = drafted(tmp_path)
    assert choices.plan["task.columns"][0] == ["crea"] and "data.decimal" not in choices.settings
    lines = [[f"P{n}", f"1.{300 + n}", f"{n},5", n % 2] for n in range(40)]
    write(tmp_path / "cases.csv", ["pid", "leukocytes", "crea", "outcome"], lines, delimiter=";")
    with pytest.raises(DataError, match="'leukocytes'"):
        drafted(tmp_path)


# for each language: the columns of patient and birth date, the event's column, and the words for yes and no
REGISTRIES = {
    "german": ("Fall-Nr.", "Geb.-Dat.", "verstorben", "ja", "nein"),
    "french": ("N° dossier", "date de naissance", "décès", "oui", "non"),
    "spanish": ("NHC", "Fecha nacimiento", "fallecido", "sí", "no"),
    "italian": ("ID paziente", "data di nascita", "status", "sì", "no"),
}


@over_all("language", REGISTRIES)
def test_a_registry_tells_patients_and_deaths_in_its_language(language: str, tmp_path: Path) -> None:
    """In earlier versions, patients' numbers and birth dates became inputs, and "nein" became the event."""
    who, born, died, yes, no = REGISTRIES[language]
    head = [who, born, "crea", "follow-up (days)", died]
    lines = [[4711 + n // 2, 19400101 + n // 2, n % 7, 30 + n, yes if n % 3 else no] for n in range(60)]
    write(tmp_path / language / "export.csv", head, lines, delimiter=";")
    draft = drafted(tmp_path / language)
    task, data = nested(draft.plan)["task"], nested(draft.settings)["data"]
    assert (task["kind"], task["columns"], task["event"]) == ("survival", ["crea"], head[-1])
    assert data["columns"] == {"patient": who} and data["label_map"] == {yes: "event", no: "censored"}


def test_a_mark_in_some_cells_is_no_class(tmp_path: Path) -> None:
    """In earlier versions, rows of units or totals became a class, and medsilo ignored rows with an empty label."""
    lines = [[n % 7, "x" if n % 3 else ""] for n in range(60)]
    write(tmp_path / "export.csv", ["dose", "target"], [["mg", "x = ja"], *lines, [9999, 40]])
    with pytest.raises(DataError, match="empty cells"):
        drafted(tmp_path)


def test_a_number_is_learned_as_one(tmp_path: Path) -> None:
    """The plan has one range for all hospitals, whose rounded limits reveal no patient's value."""
    drawn = np.random.default_rng(0)
    age = drawn.uniform(20, 90, 90).round(1)
    write(
        tmp_path / "export.csv",
        ["age", "target"],
        [[own, round(1.5 * own - 70 + noise, 2)] for own, noise in zip(age, drawn.normal(0, 9, 90), strict=True)],
    )
    assert main(["init", str(tmp_path / "export.csv"), "-o", str(tmp_path / "study"), *LINES]) == 0
    task = load_plan(tmp_path / "study" / "job" / "app" / "config" / "plan.yaml").task
    assert (task.kind, task.target, task.range) == ("regression", "target", (-60.0, 80.0))  # type: ignore[attr-defined]


def test_a_text_of_many_values_is_nothing_to_learn(tmp_path: Path) -> None:
    write(tmp_path / "export.csv", ["age", "label"], [[n % 7, f"text {n}"] for n in range(60)])
    with pytest.raises(DataError, match="'label' has 60 different values"):
        drafted(tmp_path / "export.csv")


def test_rare_values_are_one_class_of_a_target_if_enough_patients_have_them(tmp_path: Path) -> None:
    def labelled(rare: int) -> Path:
        labels = [f"grade {n}" if n < rare else "benign" for n in range(40)]
        return write(
            tmp_path / f"{rare}/export.csv", ["age", "label"], [[40 + n % 7, own] for n, own in enumerate(labels)]
        )

    assert nested(drafted(labelled(5)).plan)["task"]["labels"] == ["benign", "other"]
    with pytest.raises(DataError, match="fewer than two values of the target have 5 patients"):
        drafted(labelled(4))


PEOPLE = {  # columns in six languages whose values many patients share
    "Nachname": ["Müller", "Schäfer", "Großkopf"],
    "Zuname": ["Oberhuber", "Steiner", "Pichler"],
    "Patientenname": ["Gruber, Eva", "Wallner, Leo", "Moser, Ida"],
    "Stationsärztin": ["Dr. Winkler", "Dr. Auer", "Dr. Eder"],
    "Einweiser": ["Praxis Lechner", "Praxis Wimmer", "Praxis Haas"],
    "surname": ["Atkinson", "O'Hara", "Whitfield"],
    "Prénom": ["Célestine", "Baptiste", "Anaïs"],
    "Apellidos": ["Núñez", "Echeverría", "Ordóñez"],
    "Cognome": ["Esposito", "Colombo", "Ricciardi"],
    "achternaam": ["van den Heuvel", "Dijkstra", "Hoekstra"],
    "Dateiname": ["Mueller_Hans.edf", "Kaya_Elif.edf", "Lenz_Ida.edf"],
    "indirizzo": ["Via Roma 3", "Corso Como 9", "Via Po 12"],
    "Straße": ["Lindenweg 4", "Am Markt 1", "Hauptstr. 77"],
    "record": ["REC88123", "REC88124", "REC88125"],
    # the column's name does not reveal the content, and three patients have each value
    "comment": ["Frau Yildiz", "Herr Petersen", "Mme Lefèvre"],
    "ward": ["Zimmer Weber", "Zimmer Horvat", "main"],
}


def test_no_name_of_a_person_enters_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The table has columns of surnames, file names, record numbers and addresses, and rare values in other columns."""
    size, rare = 40, ["comment", "ward"]
    lines = [
        [n, n % 9 + 0.5, 88000 + n, 712345 + n, ["m", "M", "f"][n % 3], ["yes", "no"][n % 2]]
        + [values[n % 3] if name not in rare else "" for name, values in PEOPLE.items()]
        for n in range(size)
    ]
    head = ["patient", "dose", "mrn", "Aufnahme", "sex", "outcome", *PEOPLE]
    for place, line in enumerate(lines):
        line[head.index("comment")] = PEOPLE["comment"][0] if place < 3 else ["same", "as before"][place // 2 % 2]
        line[head.index("ward")] = PEOPLE["ward"][min(place, 2)]
    write(tmp_path / "export.csv", head, lines)
    study = tmp_path / "study"
    assert begun(tmp_path / "export.csv", study, "--set", "patients=patient") == 0
    sent = "".join(path.read_text() for path in study.joinpath("job").rglob("*") if path.is_file())
    assert not [value for values in PEOPLE.values() for value in values if value in sent and value != "main"]
    task = load_plan(study / "job/app/config/plan.yaml").task
    columns = {column.name: column.levels for column in task.columns}  # type: ignore[attr-defined]
    assert columns == {"dose": (), "sex": ("f", "m"), "comment": ("as before", "same", "other")}
    own = (study / "data-set/data.yaml").read_text()
    assert "Frau Yildiz: other" in own and "M: m" in own, "the hospital's own settings know what is what"
    assert main(["data", "accept", str(study / "data-set"), "--by", "A. Person"]) == 0
    capsys.readouterr()
    own = ["--private", str(tmp_path / "private.txt")]
    for command in (["check", "--site", "hospital-a", *own], ["disclosure"]):
        main([*command, str(study / "job"), "--settings", str(study)])
        told = capsys.readouterr().out
        assert "as before, same, other" in told and "no, yes" in told


def test_notes_give_no_category(tmp_path: Path) -> None:
    """Free-text notes never become levels, even if many patients have the same note or only two notes occur."""
    sentences = [
        f"{who} came on foot after the accident on the ring road and wants to be called at home" for who in "AB"
    ]
    notes = [["no change", "better"][n % 2] if n % 5 else f"spoke to Ms Varga, {n}" for n in range(60)]
    lines = [[n % 9, ["I", "II"][n % 3 // 2], notes[n], sentences[n % 2], n % 2] for n in range(60)]
    write(tmp_path / "export.csv", ["dose", "stage", "notes", "history", "outcome"], lines)
    draft = drafted(tmp_path / "export.csv")
    assert nested(draft.plan)["task"]["columns"] == ["dose", {"name": "stage", "levels": ["I", "II"]}]
    assert [name for name, _ in not_read(tmp_path / "export.csv")] == ["notes", "history"]
    assert "notes" not in draft.plan["task.columns"][1], "a plan is mailed, and its comments with it"


def test_words_that_end_like_a_time_or_begin_like_a_hospital_are_read(tmp_path: Path) -> None:
    """ "Überlebenstage" (days of survival) holds times, and "clinical grade" names no hospitals."""
    head = ["clinical grade", "tumorStage", "dosage", "Überlebenstage", "outcome"]
    lines = [[["low", "high"][n % 2], n % 4, n % 9, n, n % 2] for n in range(60)]
    write(tmp_path / "export.csv", head, lines)
    draft = drafted(tmp_path / "export.csv")
    columns = nested(draft.plan)["task"]["columns"]
    assert columns == [{"name": "clinical grade", "levels": ["high", "low"]}, "tumorStage", "dosage"]
    assert nested(draft.plan)["participation"]["sites"] == ["hospital-a"]


@over_all("sites", [["."], ["north", "south"]])
def test_tables_of_the_same_patients_are_no_hospitals_and_no_recordings(sites: Sequence[str], tmp_path: Path) -> None:
    """In earlier versions, medsilo silently ignored a second table, or read tables in folders as time series."""
    folder = tmp_path / str(len(sites))
    for site in sites:
        write(folder / site / "laboratory.csv", ["Patient", "crp"], [[f"P{n}", n % 9] for n in range(40)])
        write(folder / site / "main.csv", ["Patient", "age", "outcome"], [[f"P{n}", n, n % 2] for n in range(40)])
    with pytest.raises(DataError, match=r"laboratory\.csv and main\.csv .*join"):
        drafted(folder)


def test_titles_above_the_names_of_the_columns_are_no_lines(tmp_path: Path) -> None:
    lines = [["", "lab", "", ""], ["age", "crp", "dose", "outcome"], *([n % 37, n % 9, 1, n % 2] for n in range(40))]
    write(tmp_path / "export.csv", ["Ward 4", "", "", ""], lines, delimiter=";")
    assert nested(drafted(tmp_path).plan)["task"]["columns"] == ["age", "crp"]
    columns = read_columns(tmp_path / "export.csv")
    assert (columns.count, columns.lines_called(np.array([0]))) == (40, ("line 4",))


def test_dates_are_no_category_and_a_tumours_site_is_no_hospital(tmp_path: Path) -> None:
    """The plan contains no dates of patients' visits."""
    head = ["Admission", "entry", "EF", "Tumor site", "dose", "HPV", "outcome"]
    lines = [
        [
            f"2023-0{1 + n % 9}-11",
            f"{1 + n % 9}.3.24",
            f"{n}%",
            ["colon", "rectum"][n % 2],
            n % 9,
            ["+", "-"][n % 2],
            n % 2,
        ]
        for n in range(60)
    ]
    write(tmp_path / "export.csv", head, lines)
    plan = drafted(tmp_path / "export.csv").plan
    columns, whys = plan["task.columns"][0], dict(not_read(tmp_path / "export.csv"))
    assert columns == [{"name": "Tumor site", "levels": ["colon", "rectum"]}, "dose"]
    for name, remedy in (("Admission", "dates"), ("entry", "dates"), ("EF", "without units"), ("HPV", "'-'")):
        assert remedy in whys[name]
    assert plan["participation.sites"][0] == ["hospital-a"]


@over_all("text", ["id;age;outcome\n", "id;age;outcome\n1;70;0;\n2;80;1;\n"])
def test_a_table_without_whole_lines_is_named(text: str, tmp_path: Path) -> None:
    """In earlier versions, medsilo read an empty or incomplete table as a recording, together with the folder's other
    tables.
    """
    (tmp_path / "south.csv").write_text(text)
    write(tmp_path / "north.csv", ["id", "age", "outcome"], [[n, n % 30, n % 2] for n in range(40)])
    with pytest.raises(DataError, match=r"^south\.csv has no line"):
        drafted(tmp_path)


NUMBERS = {
    "grades": (range(5), "classification"),
    "ten scanners": (range(10), "classification"),
    "grades, and 99 for unknown": ([0, 1, 2, 3, 4, 5, 99], "classification"),
    "a score of 0 to 12": (range(13), "regression"),
    "days in hospital": ([1, 2, 4, 7, 9, 14, 30], "regression"),
    "half points": ([0.5 * step for step in range(8)], "regression"),
    "one half point": ([1, 1.5, 2], "classification"),
}


@over_all("what", NUMBERS)
def test_few_numbers_are_classes_only_where_they_look_like_grades(what: str, tmp_path: Path) -> None:
    values, kind = NUMBERS[what]
    lines = [[n % 11, values[n % len(values)]] for n in range(20 * len(values))]
    task = drafted(write(tmp_path / what / "export.csv", ["dose", "target"], lines)).plan
    other = {"classification": "regression", "regression": "classification"}[kind]
    assert task["task.kind"][0] == kind and other in task["task.kind"][1], "it says how to learn it otherwise"
    assert ("task.range" in task) == (kind == "regression") != ("task.labels" in task)
    scores = {"classification": "balanced_accuracy" if len({*values}) > 2 else "auroc", "regression": None}
    assert task.get("task.score", (None, ""))[0] == scores[kind]


def test_a_number_of_a_patient_counts_before_the_name(tmp_path: Path) -> None:
    """Two patients with the same name and different numbers remain two patients."""
    lines = [["Huber, Anna" if n < 3 else f"N{n}", f"P{n}", n % 7, ["ja", "nein"][n % 2]] for n in range(60)]
    write(tmp_path / "export.csv", ["Patientenname", "Pat.-ID", "dose", "outcome"], lines)
    draft = drafted(tmp_path / "export.csv")
    assert draft.settings["data.columns"][0]["patient"] == "Pat.-ID"
    assert nested(draft.plan)["task"]["labels"] == ["nein", "ja"], "a report tells the sensitivity for ja"


NAMED = {  # for four more languages: the columns of patient, doctor and referrer, and a column without names
    "polish": ({"Nazwisko": "Wiśniewska", "Imię": "Zofia", "kod_pocztowy": "00-950", "Lekarz": "dr Wójcik"}, "palenie"),
    "turkish": ({"Soyadı": "Yılmaz", "ADI": "Çağla", "TC Kimlik": "K-4711", "Hekim": "Dr. Öztürk"}, "sigara"),
    "greek": (
        {"Επώνυμο": "Παπαδοπούλου", "ΔΙΕΎΘΥΝΣΗ": "Ερμού 9", "Αρ. φακέλου": "Φ-12", "Ιατρός": "Νίκου"},
        "κάπνισμα",
    ),
    "portuguese": (
        {"Apelido": "Gonçalves", "Morada": "Rua Augusta 7", "Utente": "U-88", "Médico": "Dra. Brandão"},
        "AD",
    ),
    "english": (
        {"physician": "Dr. O'Neill", "annotator": "Sato", "referringSurgeon": "Adeyemi", "postal code": "D02"},
        "ad",
    ),
}


@pytest.mark.parametrize("language", NAMED)
def test_columns_that_name_somebody_are_told_in_ten_languages(language: str, tmp_path: Path) -> None:
    """medsilo recognises a column of doctors, streets or surnames even if many patients have the same value."""
    people, harmless = NAMED[language]
    lines = [
        [n % 7 + 0.5, ["yes", "no"][n % 3 // 2], ["a", "b"][n % 2]]
        + [f"{value}{' II' if n % 4 else ''}" for value in people.values()]
        for n in range(48)
    ]
    write(tmp_path / "export.csv", ["dose", harmless, "outcome", *people], lines)
    study = tmp_path / "study"
    assert begun(tmp_path / "export.csv", study, *LINES) == 0
    sent = "".join(path.read_text() for path in study.joinpath("job").rglob("*") if path.is_file())
    assert not [value for value in people.values() if value in sent]
    task = load_plan(study / "job/app/config/plan.yaml").task
    assert [column.name for column in task.columns] == ["dose", harmless]  # type: ignore[attr-defined]


def test_a_folder_of_patients_is_no_folder_of_classes_or_hospitals(tmp_path: Path) -> None:
    for number, name in enumerate(("Mueller_Hans", "Kaya_Elif", "Lenz_Ida")):
        for image in range(4):
            write_pixels(tmp_path / "classes" / name / f"{image}.png", photograph(number)[0])
        for image in range(3):
            write_pixels(tmp_path / "sites" / name / "images" / f"{image}.png", photograph(number)[0])
            write_pixels(tmp_path / "sites" / name / "masks" / f"{image}.png", photograph(number)[1])
    for folder in ("classes", "sites"):
        with pytest.raises(DataError, match="may be (a patient|patients|of one patient)") as caught:
            drafted(tmp_path / folder)
        assert "Kaya" not in str(caught.value) and ("Kaya_Elif" in caught.value.private) == (folder == "classes")


def test_hospitals_may_spell_alike_columns_and_values_otherwise(tmp_path: Path) -> None:
    """Hospitals may use different capitals and different texts for missing values, and a column may be constant at one
    hospital.
    """
    for site, age, level, ill in (("north", "age", "Yes", "ill"), ("south", "Age", "yes", "Ill")):
        ages = [n % 40 + 40 if n % 8 else ["k.A.", "n/a"][n % 16 // 8] for n in range(60)]
        doses = [7 if site == "north" else n % 5 for n in range(60)]
        lines = [[ages[n], [level, "no"][n % 2], doses[n], [ill, "well"][n % 3 // 2]] for n in range(60)]
        write(tmp_path / "data" / f"{site}.csv", [age, "smoker", "dose", "outcome"], lines)
    draft = drafted(tmp_path / "data")
    task = nested(draft.plan)["task"]
    assert task["columns"] == ["age", {"name": "smoker", "levels": ["Yes", "no"]}, "dose"]
    south = {key: value for key, (value, _) in draft.sites["south"].items()}
    assert "data.columns" not in south and south["data.levels"] == {"smoker": {"yes": "Yes"}}
    assert [name.lower() for name in task["labels"]] == ["well", "ill"], "a report tells the sensitivity for the ill"
    found = made(tmp_path / "data")
    plan = write_start(tmp_path / "study", found.sight.choices, found.sets)
    for site in plan.participation.sites:
        survey = plan.task.survey(site, ["north", "south"], 0, SiteSettings.read(tmp_path / "study" / site).data)
        assert survey.usable and sum(part.cases for part in survey.parts.values()) == 60


def test_target_names_the_column_that_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(
        tmp_path / "data" / "x.csv",
        ["age", "dose", "Verlauf"],
        [[n % 40, n % 7, ["gut", "schlecht"][n % 2]] for n in range(40)],
    )
    out = ["-o", str(tmp_path / "study"), "--no-train"]
    assert main(["init", str(tmp_path / "data" / "x.csv"), *out]) == 1
    assert "--target COLUMN" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "data" / "x.csv"), *out, "--target", "outcome"]) == 1
    assert "age, dose, Verlauf" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "data" / "x.csv"), *out, "--target", "verlauf", *LINES]) == 0
    task = load_plan(tmp_path / "study/job/app/config/plan.yaml").task
    assert (task.target, task.labels) == ("Verlauf", ("gut", "schlecht"))  # type: ignore[attr-defined]


SURVIVAL = ["inst", "time", "status", "age", "sex"]


def survivals(path: Path, sites: Sequence[str], unlike: str = "") -> Path:
    drawn = np.random.default_rng(0)
    lines = [
        [site, drawn.integers(5, 900), int(site != unlike and n % 3 > 0), drawn.integers(40, 80), n % 2]
        for site in sites
        for n in range(30)
    ]
    return write(path, SURVIVAL, lines)


def test_a_hospital_is_the_same_however_its_number_is_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """pandas writes the integers of a column as 3.0 if a value is missing, but the plan names the hospital 3."""
    survivals(tmp_path / "data/all.csv", ["3.0", "11.0"])
    assert begun(tmp_path / "data", tmp_path / "study", *LINES) == 0
    assert load_plan(tmp_path / "study/job/app/config/plan.yaml").participation.everyone == ("11", "3")
    assert DataSet.read(tmp_path / "study/data-set").hospitals == {"3": 30, "11": 30}
    run = ["run", str(tmp_path / "study/job"), "--settings", str(tmp_path / "study"), "--set", "training.rounds=1"]
    assert main([*run, "-o", str(tmp_path / "runs"), "--engine", "inprocess"]) == 0, capsys.readouterr().err


def test_a_hospital_whose_name_has_blanks_takes_part_by_a_name_without(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """In earlier versions, the hospital name 'Nord Ost' stopped `medsilo init`, although medsilo can replace the
    space.
    """
    survivals(tmp_path / "data/all.csv", ["Nord Ost", "St. Anna Klinik"])
    assert begun(tmp_path / "data", tmp_path / "study", *LINES) == 0
    assert "hospital 'St. Anna Klinik' is called St-Anna-Klinik in the plan" in capsys.readouterr().out
    job = tmp_path / "study/job"
    assert load_plan(job / "app/config/plan.yaml").participation.everyone == ("Nord-Ost", "St-Anna-Klinik")
    run = ["run", str(job), "--settings", str(tmp_path / "study"), "--set", "training.rounds=1"]
    assert main([*run, "-o", str(tmp_path / "runs"), "--engine", "inprocess"]) == 0, capsys.readouterr().err
    assert (
        main(["data", str(tmp_path / "data"), "-o", str(tmp_path / "set"), "--yes", "--name", "St Anna", *LINES]) == 0
    )
    assert DataSet.read(tmp_path / "set").name == "St-Anna"


def test_a_hospital_of_few_events_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    survivals(tmp_path / "data/all.csv", ["north", "south", "west"], unlike="south")
    assert main(["init", str(tmp_path / "data"), "-o", str(tmp_path / "study"), "--device", "cpu", *LINES]) == 0
    told = capsys.readouterr().out
    assert "left out: hospital 'south' (of fewer than 5 events" in told and "medsilo compare" in told
    assert "60 lines of 60 patients" in told and "north (30), west (30)" in told
    assert load_plan(tmp_path / "study/job/app/config/plan.yaml").participation.sites == ("north", "west")


def test_a_comparison_that_would_fail_is_not_advised_and_the_hospital_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """At the hospital "north", all patients without an event were observed for less time than any patient with an
    event.
    """
    whole = [["south", 10 + n * 37 % 90, n % 2, 40 + n, n % 3] for n in range(30)]
    early = [["north", 50 if n > 14 else n + 1, int(n > 14), 40 + n, n % 3] for n in range(24)]
    write(tmp_path / "data/all.csv", SURVIVAL, [*early, *whole])
    assert main(["init", str(tmp_path / "data"), "-o", str(tmp_path / "study"), "--device", "cpu", *LINES]) == 1
    streams = capsys.readouterr()
    assert "medsilo compare" not in streams.out and "north: the" in streams.err


def sent_by(study: Path) -> str:
    return "".join(path.read_text() for path in study.joinpath("job").rglob("*") if path.is_file())


def visits(path: Path, target: str = "") -> Path:
    lines = [[50 + n % 9, n % 7, target or ["yes", "no"][n % 2]] for n in range(24)]
    return write(path, ["age", "dose", "outcome"], lines)


def pictures(folder: Path, count: int, kind: str = "images") -> None:
    first = 50 * sum(map(ord, folder.name + kind))
    for number in range(count):
        image, mask = photograph(first + number)
        write_pixels(folder / kind / f"{number}.png", image)
        if kind == "images":
            write_pixels(folder / "masks" / f"{number}.png", mask)


def patients_as_classes(data: Path) -> None:
    for name in ("Quast", "Okonjo", "Lindqvist"):
        pictures(data, 8, name)


def few_patients_as_hospitals(data: Path) -> None:
    for name in ("Quast", "Okonjo", "Lindqvist"):
        pictures(data / name, 12)


def patients_with_classes(data: Path) -> None:
    for name in ("Quast", "Okonjo"):
        for kind in ("benign", "malignant"):
            pictures(data / name, 8, kind)


def a_table_for_each_patient(data: Path) -> None:
    for name in ("Quast", "Okonjo", "Lindqvist"):
        visits(data / f"{name}.csv")


def a_diagnosis_of_one(data: Path) -> None:
    lines = [[50 + n % 9, n % 7, "Quast" if n < 6 else ["benign", "malignant"][n % 2]] for n in range(40)]
    write(data / "export.csv", ["age", "dose", "diagnosis"], lines)


def physicians(data: Path) -> None:
    who = ["Dr. Quast", "Dr. Okonjo"]
    lines = [
        [f"P{n}", n % 9, n % 7, n % 2, who[n % 2], who[n // 2 % 2], who[n // 4 % 2], ["Ida Quast", "Ben Okonjo"][n % 2]]
        for n in range(48)
    ]
    write(data / "export.csv", ["patient", "age", "dose", "outcome", "attending", "reviewed", "seen by", "ward"], lines)


def recordings_of_patients(data: Path) -> None:
    for name in ("Quast", "Okonjo"):
        for n in range(12):
            write(data / name / f"walk{n}.csv", ["x", "y"], [[n + k % 5, k % 7] for k in range(64)])


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (recordings_of_patients, ["patients=each case is a patient"]),
        (patients_as_classes, ["folders=classes", "patients=each image is a patient"]),
        (few_patients_as_hospitals, ["folders=patients"]),
        (patients_with_classes, ["folders=patients"]),
        (a_table_for_each_patient, ["patients=each line is a patient"]),
        (a_diagnosis_of_one, ["patients=each line is a patient"]),
        (physicians, []),
    ],
)
def test_no_word_that_may_be_a_name_is_sent(
    layout: Callable[[Path], None], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """If no column identifies the patient, `medsilo init` asks, and the plan contains no person's name after the
    answer.
    """
    layout(tmp_path / "data")
    study, answers = tmp_path / "study", [f"--set={answer}" for answer in said]
    if said:
        assert begun(tmp_path / "data", study) == 1 and not study.exists()
        assert f"medsilo: {said[0].partition('=')[0]}" in capsys.readouterr().err
    few = "folders=patients" in said
    assert begun(tmp_path / "data", study, *answers) == few
    assert not [name for name in ("Quast", "Okonjo", "Lindqvist") if not few and name.lower() in sent_by(study).lower()]


def test_columns_that_are_patients_are_no_columns(tmp_path: Path) -> None:
    lines = [[f"CD{n}", n % 5, n % 7, n % 3, n % 2] for n in range(40)]
    write(tmp_path / "genes/export.csv", ["gene", "Quast", "Okonjo", "Lindqvist", "outcome"], lines)
    write(tmp_path / "days/export.csv", ["day", "Hans Quast", "Anna Okonjo", "Lindqvist", "outcome"], lines)
    for folder in ("genes", "days"):
        with pytest.raises(DataError, match="columns of export.csv may be patients"):
            drafted(tmp_path / folder)


def test_many_folders_alike_are_hospitals_only_where_somebody_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = [f"{first}{last}" for first in ("Qu", "Ok", "Lin") for last in ("ast", "onjo", "dqvist")]
    for name in names:
        visits(tmp_path / f"data/{name}.csv")
    visits(tmp_path / "data/Hans_Quast.csv")
    init = ["init", str(tmp_path / "data"), "-o", str(tmp_path / "study"), "--no-train", "--device", "cpu"]
    assert main(init) == 1
    assert "--hospitals" in capsys.readouterr().err and not (tmp_path / "study").exists()
    assert main([*init, "--hospitals", *LINES]) == 0
    sites = load_plan(tmp_path / "study/job/app/config/plan.yaml").participation.everyone
    assert sites == tuple(sorted([*names, "hospital-1"])), "told of hospitals, and never the name of a person"
