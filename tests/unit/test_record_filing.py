"""`medsilo record`: what it says is true of this plan and this hospital, and it says nothing else."""

import ast
import csv
import io
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import docx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from rdflib import Graph

from docs.evidence import rows_in
from docs.tables import PROMISED, promised_csv
from medsilo.check.at_home import KitAtHome
from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.core.files import dump_yaml, load_yaml
from medsilo.core.package import package_facts
from medsilo.federation import inprocess
from medsilo.plan import parse_plan
from medsilo.sealing import signed
from medsilo.site.approvals import ApprovalLimits, AskingPlan
from medsilo.site.settings import SiteSettings
from medsilo_record import bom, filing
from medsilo_record.outcomes import GAP, LEFT, SHOWN, outcomes, promises
from tests.conftest import SITES, make_plan
from tests.hospital import write_table
from tests.unit.test_approvals import Home

A, B, C = SITES[:3]
TABLE = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "table", "columns": ["age", "dose"], "target": "outcome", "labels": ["well", "ill"]},
    "training": {"rounds": 3},
    "participation": {"sites": [A, B, C]},
}
OWN = [{"name": name, "mean": 60.0, "deviation": 10.0} for name in ("age", "dose")]
PRIVATE = {
    **TABLE,
    "task": {**TABLE["task"], "columns": OWN, "standardise": "plan"},
    "privacy": {"epsilon": 2.0, "delta": 1e-3, "unit": "record"},
}
SEALED = {"transport": {"sealing": "pairwise"}}
DEMANDS = {"epsilon": 4.0, "delta": 1e-3, "unit": "record", "public": {"counts": "in our annual report"}}
PATIENTS = [f"pat-{number:03d}-secret" for number in range(63)]
NEEDED = (
    "dpv#hasLegalBasis",
    "dpv#hasRisk",
    "odrl/2/prohibition",
    "health#hdab",
    "terms/provenance",
    "health#hasVariables",
)
HTML = re.compile(r'<tr id="([\w-]+)">(.*?)</tr>', re.DOTALL)


def lines(**more: str) -> list[dict[str, object]]:
    return [
        {"patient": name, "age": 50 + n % 30, "dose": n, "outcome": ["well", "ill"][n % 2], **more}
        for n, name in enumerate(PATIENTS)
    ]


@pytest.fixture(scope="module", autouse=True)
def packages_listed_once() -> Iterator[None]:
    """The list of packages is the same in every record of a process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bom, "installed", cache(bom.installed))
        yield


@dataclass
class Hospital:
    """A hospital with a table, without a kit."""

    folder: Path

    def settings(self, **more: Any) -> None:
        told = {"device": "cpu", "data": {"folder": str(self.folder / "data"), "table": "cases.csv"}, **more}
        (self.folder / "local/medsilo.yaml").write_text(dump_yaml(told))

    def record(self, plan: dict[str, Any], name: str, *more: str, out: bool = True) -> Path:
        file, there = self.folder / f"{name}.yaml", self.folder / name
        file.write_text(dump_yaml(plan))
        given = ["--settings", str(self.folder / "local"), "--site", A, *(["-o", str(there)] if out else [])]
        assert main(["record", str(file), *given, *more]) == 0
        return there


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Hospital:
    hospital = Hospital(tmp_path_factory.mktemp("hospital"))
    (hospital.folder / "local").mkdir()
    write_table(hospital.folder / "data/cases.csv", lines())
    hospital.settings()
    return hospital


@pytest.fixture(scope="module")
def filed(hospital: Hospital) -> Path:
    """A record as it is usually written."""
    return hospital.record(TABLE, "filed")


def said(folder: Path, key: str) -> str:
    return "\n".join(json.loads((folder / "record.json").read_text())["entries"][key])


def states(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    rows = csv.DictReader(io.StringIO((folder / "outcomes.csv").read_text()))
    return {(row["framework"], row["outcome"]): row for row in rows}


# ---------------------------------------------------------------------------------------------------- validators
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (TABLE, {}),
    "sealed, approved": ({**TABLE, **SEALED}, {"approval": "required"}),
    "private": (PRIVATE, {"privacy": DEMANDS}),
    "drawn": (make_plan().resolved(), {"data": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_validators_pass(name: str, hospital: Hospital, root: Path) -> None:
    pyshacl = pytest.importorskip("pyshacl")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    plan, more = CASES[name]
    hospital.settings(**more)
    folder = hospital.record(plan, "validated")
    hospital.settings()
    shapes = Graph().parse(root / "docs/record.shapes.ttl")
    for file, form in (("record.jsonld", "json-ld"), ("dataset.ttl", "turtle")):
        graph = Graph().parse(folder / file, format=form)
        conforms, _, why = pyshacl.validate(graph, shacl_graph=shapes)
        assert conforms, why
        if name == "plain":  # and the shapes see what is missing
            gone = [line for line in graph if str(line[1]).endswith(NEEDED)]
            for line in gone:
                graph.remove(line)
            conforms, _, why = pyshacl.validate(graph, shacl_graph=shapes)
            assert not conforms and f"Results ({len({line[1] for line in gone})})" in why
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str((folder / "model.cdx.json").read_text()) is None


# ---------------------------------------------------------------------------------------------------- what is said
def question_places(root: Path) -> Iterator[tuple[str, str]]:
    page = (root / "docs/review.md").read_text("utf-8").splitlines()
    start = next(place for place, line in enumerate(page) if line.startswith("### Twenty questions"))
    for row in rows_in(page[start:]):
        yield row["question"], row["where"].strip("`")


def test_twenty_questions_are_answered_from_the_files(filed: Path, root: Path) -> None:
    """Each place that docs/review.md names is there and says something, or has a blank to fill in."""
    cells = dict(HTML.findall((filed / "record.html").read_text()))
    process, *nodes = json.loads((filed / "record.jsonld").read_text())["@graph"]
    linked = {**process, **next(node for node in nodes if "odrl:permission" in node)}
    questions = dict(question_places(root))
    assert len(questions) == 20
    for question, where in questions.items():
        file, _, place = where.replace("#", " ").partition(" ")
        text = (filed / file).read_text()
        match file:
            case "record.html":
                assert len(re.sub(r"<.*?>|\s", "", cells[place])) > 40, question
            case "record.jsonld":
                assert linked[place], question
            case "model.cdx.json":
                assert '"pkg:pypi/torch@' in text and json.loads(text)[place]
            case "outcomes.csv":
                assert any(row[place] for row in states(filed).values()), question
            case _:
                assert place in text, question
    written = {line.text for line in docx.Document(str(filed / "record.docx")).paragraphs}
    entries = json.loads((filed / "record.json").read_text())["entries"]
    assert not [line for key, lines in entries.items() for line in lines if line not in written]


def test_counts_leave_in_the_hospitals_own_steps(hospital: Hospital, filed: Path) -> None:
    """63 cases of 63 patients are 65 in steps of 5; fewer than 70, or those of a private study, are not told."""
    individuals = "healthdcatap:numberOfUniqueIndividuals"
    assert f'{individuals} "65"' in (filed / "dataset.ttl").read_text()
    assert "65 cases of 65 patients, in steps of 5." in said(filed, "subjects")
    assert '"medsilo:cases"' in (filed / "model.cdx.json").read_text()
    few = Hospital(hospital.folder)
    for more, plan in (({"smallest_metric": 70}, TABLE), ({}, PRIVATE), ({"data": None}, TABLE)):
        few.settings(**more)
        folder = few.record(plan, "few")
        assert individuals not in (folder / "dataset.ttl").read_text() and "65" not in said(folder, "subjects")
    hospital.settings()


def test_what_changed_is_in_the_text(hospital: Hospital, filed: Path, capsys: pytest.CaptureFixture) -> None:
    """One key of the plan, the hospital's own settings, or another medsilo."""
    changed = {
        ("transport.sealing was none and is pairwise", "reads sums of it alone"): SEALED,
        (f"participation.sites was ['{A}', '{B}', '{C}'] and is", "Training a model by 4 hospitals", "hospital-d"): {
            "participation": {"sites": [A, B, C, "hospital-d"]}
        },
        ("training.rounds was 3 and is 30", "rounds 1 to 30", "leave in 30 rounds"): {"training": {"rounds": 30}},
    }
    for words, change in changed.items():
        hospital.record({**TABLE, **change}, "new", "--compare", str(filed), out=False)
        text = capsys.readouterr().out
        for word in words:
            assert word in text, text
    hospital.record(TABLE, "new", "--compare", str(filed), out=False)
    assert capsys.readouterr().out.strip().endswith("nothing changed")
    hospital.settings(approval="required")
    folder = hospital.record(TABLE, "new", "--compare", str(filed))
    hospital.settings()
    assert 'the record now says "No plan runs here that' in capsys.readouterr().out
    record = json.loads((filed / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**record, "version": "0.0.9", "build": "f" * 64}))
    hospital.record(TABLE, "newer", "--compare", str(folder), out=False)
    assert f"medsilo was 0.0.9 (build {'f' * 12}) and is" in capsys.readouterr().out


def test_hospitals_get_sentences_that_are_true_of_them(hospital: Hospital) -> None:
    bounded, guessed = "one patient (or record) moves what leaves by one bound", "may find out whether a patient"
    plain = hospital.record(TABLE, "open")
    assert "no bound holds" in said(plain, "privacy") and "demands no differential privacy" in said(plain, "privacy")
    assert guessed in said(plain, "risks") and "reads it as it is" in said(plain, "leaves")
    assert bounded not in said(plain, "measures") and "not the difference of two studies" in said(plain, "measures")
    hospital.settings(privacy=DEMANDS)
    refused = hospital.record(TABLE, "refused")
    assert "So this hospital refuses the plan: this hospital demands" in said(refused, "privacy")
    private = hospital.record(PRIVATE, "private")
    told = said(private, "privacy")
    assert "at most ε = 2 at δ = 0.001 for each record" in told and "refuses" not in told
    assert "Numbers of cases: 0: declared public (in our annual report)." in told
    assert bounded in said(private, "measures") and guessed not in said(private, "risks")
    noise = ["dpv:DifferentialPrivacy" in (folder / "record.jsonld").read_text() for folder in (private, plain)]
    iso = ("ISO/IEC 27001", "A.5.34")
    assert noise == [True, False] and [states(folder)[iso]["state"] for folder in (private, plain)] == [SHOWN, GAP]
    hospital.settings(public_data=True)
    public = hospital.record(TABLE, "public")
    assert "not the difference of two studies" not in said(public, "measures"), "scores leave exactly there"
    assert states(public)["ISO/IEC 27001", "A.8.12"]["state"] == GAP
    hospital.settings()


# ---------------------------------------------------------------------------------------------------- tests that show
def defined(root: Path, file: str) -> set[str]:
    return {
        node.name for node in ast.walk(ast.parse((root / file).read_text("utf-8"))) if isinstance(node, ast.FunctionDef)
    }


def test_every_test_that_is_named_exists(root: Path) -> None:
    """`python -m tests.claims` says besides whether each ran and passed in this build."""
    named = {test for one in (*outcomes(), *promises()) for test in one.tests}
    assert len(named) > 60
    files = {test.partition("::")[0] for test in named}
    known = {file: defined(root, file) for file in files}
    assert not [test for test in named if test.partition("::")[2] not in known[test.partition("::")[0]]]
    assert PROMISED.read_text("utf-8") == promised_csv(), "make docs-tables writes it again"


def test_outcomes_are_all_there_and_no_verdicts(filed: Path) -> None:
    rows = states(filed)
    dspt = [key for framework, key in rows if framework == "DSPT"]
    assert len(dspt) == 49 and sum(key.startswith("E") for key in dspt) == 8
    assert {f"Art. {number}" for number in range(9, 16)} == {key for framework, key in rows if framework == "EU AI Act"}
    assert {row["state"] for row in rows.values()} == {SHOWN, LEFT, GAP}
    assert all(bool(row["shown by"]) == (row["state"] == SHOWN) for row in rows.values())
    assert all(row["remark"] for row in rows.values() if row["state"] == GAP), "a gap says what is missing"
    assert {row["build"] for row in rows.values()} == {package_facts()["hash"]}
    assert not re.search(r"achieved|compliant|fulfilled|conform|certified", (filed / "outcomes.csv").read_text(), re.I)


# ---------------------------------------------------------------------------------------------------- secrets, bytes
def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Every text in a record's files, those within the Word document, too."""
    for path in folder.iterdir():
        yield path.name, path.read_bytes().decode("utf-8", "replace")
        if path.suffix == ".docx":
            with ZipFile(path) as parts:
                yield from (
                    (f"{path.name}:{name}", parts.read(name).decode("utf-8", "replace")) for name in parts.namelist()
                )


def test_no_patient_path_or_host_is_in_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are planted wherever a hospital has some, and looked for in every file; what was planted was read."""
    monkeypatch.setenv("LOGNAME", "planted-user")
    monkeypatch.setattr(socket, "gethostname", lambda: "planted-host")
    home = Home(tmp_path / "planted-kit-folder")
    data = tmp_path / "planted-data"
    write_table(data / "planted-cases.csv", lines(**{"planted-column": "planted"}))
    own = {"folder": str(data), "table": "planted-cases.csv", "cache_folder": str(tmp_path / "planted-cache")}
    places = {"output": str(tmp_path / "planted-output"), "records": str(tmp_path / "planted-records")}
    told = {"device": "cpu", "approval": "required", "data": own, **places}
    (home.folder / "local/medsilo.yaml").write_text(dump_yaml(told))
    hidden = {"path": "acme.Hide", "args": {"file": "/planted/filter", "salt": "planted-salt"}}
    scope = {"name": "all", "properties": {}, "task_result_filters": [hidden]}
    (home.folder / "local/privacy.json").write_text(json.dumps({"scopes": [scope], "default_scope": "all"}))
    plan = parse_plan(TABLE)
    file = tmp_path / "planted-plan.yaml"
    file.write_text(plan.to_yaml())
    KitAtHome.read(home.folder).approvals.decide(plan.hash, "approved", "planted-engineer", ApprovalLimits(rounds=9))
    run = tmp_path / "planted-run"
    drawn = make_plan("fedavg", "training.rounds=2")
    inprocess.run(drawn, folder=run, settings=SiteSettings(device="cpu"))
    for name, given in (("one", [str(file)]), ("two", [str(run / "plan.yaml"), "--run", str(run)])):
        assert main(["record", *given, "--kit", str(home.folder), "-o", str(tmp_path / name)]) == 0
        secrets = ("planted", "-secret", str(tmp_path).lower(), socket.gethostname(), "localhost", "/home/", "/tmp/")
        every = [(where, text.lower()) for where, text in texts(tmp_path / name)]
        assert not [(secret, where) for where, text in every for secret in secrets if secret in text]
    assert "65 cases of 65 patients" in said(tmp_path / "one", "subjects")
    assert "Hide {}" in said(tmp_path / "one", "report"), "the filter is named without its arguments"
    assert "This plan is approved here, at most 9 rounds." in said(tmp_path / "one", "approval")
    made = json.loads((tmp_path / "two/model.cdx.json").read_text())
    rounds = [own for own in made["metadata"]["component"]["modelCard"]["properties"] if ":round:" in own["name"]]
    assert len(rounds) == 2 and all(re.fullmatch(r"[0-9a-f]{64}", own["value"]) for own in rounds)
    files = {own["name"] for own in made["components"] if own["type"] == "file"}
    assert files == {"best.safetensors", "last.safetensors"}
    asked = AskingPlan(plan=home.plan.resolved(), hash=home.plan.hash, at=1)  # its page names this command
    KitAtHome.read(home.folder).approvals.keep(asked)
    own = ["--kit", str(home.folder), "-o", str(tmp_path / "three")]
    assert main(["record", str(file), *own, "--run", str(run)]) == 1, "a run of another plan"
    assert main(["record", home.plan.hash[:12], *own]) == 0
    assert json.loads((tmp_path / "three/record.json").read_text())["hash"] == home.plan.hash
    key = json.loads((tmp_path / "three/signature.json").read_text())["key"]
    assert main(["record", "--verify", str(tmp_path / "three"), "--key", signed.fingerprint(key)]) == 0


def test_twice_the_same_bytes(hospital: Hospital, filed: Path) -> None:
    again = hospital.record(TABLE, "again")
    files = sorted(path.name for path in filed.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    assert [name for name in files if (filed / name).read_bytes() != (again / name).read_bytes()] == []


@pytest.mark.parametrize("kind", ["rsa", "ec", "ed25519"])
def test_a_key_of_every_kind_signs_alike_twice_and_a_change_is_noticed(kind: str, tmp_path: Path) -> None:
    made = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ec": lambda: ec.generate_private_key(ec.SECP256R1()),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }[kind]
    key, other, files = made(), made(), {"a.txt": b"one", "b.txt": b"two"}
    own = filing.write_signed(tmp_path / "x", files, key)
    assert filing.write_signed(tmp_path / "y", files, key) == own
    assert (tmp_path / "x/signature.json").read_bytes() == (tmp_path / "y/signature.json").read_bytes()
    assert filing.verify(tmp_path / "x", own.upper()) == 2
    theirs = filing.write_signed(tmp_path / "z", files, other)
    signature, fresh = tmp_path / "x/signature.json", (tmp_path / "x/signature.json").read_text()
    told = json.loads(fresh)

    def refused(why: str, expected: str = own) -> None:
        with pytest.raises(MedsiloError, match=why) as error:
            filing.verify(tmp_path / "x", expected)
        assert "\n" not in str(error.value) and str(tmp_path) not in str(error.value)
        signature.write_text(fresh)
        (tmp_path / "x/a.txt").write_bytes(b"one")
        (tmp_path / "x/c.txt").unlink(missing_ok=True)

    (tmp_path / "x/a.txt").write_bytes(b"One")
    refused("a.txt was changed")
    (tmp_path / "x/a.txt").write_bytes(b"One")
    refused("a.txt was changed", expected="")  # before whose key it is
    (tmp_path / "x/a.txt").unlink()
    refused("a.txt is missing")
    (tmp_path / "x/c.txt").write_text("more")
    refused("c.txt is not signed")
    signature.write_text(fresh.replace(told["content"]["files"]["a.txt"], "0" * 64))
    refused("signature.json was changed")
    signature.write_bytes((tmp_path / "z/signature.json").read_bytes())  # a whole record of somebody else's key
    refused(f"the key {theirs} signed it; it is not the one given")
    refused("ask the hospital for its key", expected="")
    for damaged in ("", "[]", "{}", '{"content":{"files":{"../x":"0"}},"key":"00","signature":"00"}', "x" * 100):
        signature.write_text(damaged)
        refused("damaged")


def test_errors_of_the_command_are_one_line(hospital: Hospital, filed: Path, capsys: pytest.CaptureFixture) -> None:
    plan, local = str(hospital.folder / "filed.yaml"), str(hospital.folder / "local")
    key = json.loads((filed / "signature.json").read_text())["key"]
    assert main(["record", "--verify", str(filed), "--key", signed.fingerprint(key)]) == 0
    for arguments, words in (
        ([plan], "give a plan, and -o FOLDER"),
        ([plan, "-o", "x"], "whose record? give --kit KIT, or --settings"),
        ([plan, "-o", "x", "--settings", local, "--site", "nobody"], "nobody is not in this plan"),
        ([plan, "--settings", local, "--compare", str(hospital.folder)], "no job at"),
        (["--verify", str(hospital.folder)], "there is no signature.json"),
        (["--verify", str(filed)], "signed it; ask the hospital for its key"),
    ):
        capsys.readouterr()
        assert main(["record", *arguments]) == 1
        told = capsys.readouterr().err.strip()
        assert words in told and "\n" not in told, told
    assert load_yaml((hospital.folder / "local/medsilo.yaml").read_text())
