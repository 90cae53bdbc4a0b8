"""`medsilo check` finds each planted fault, accepts a site without faults, and prints no patient names in text for
other people.
"""

import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
import psutil
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from packaging.requirements import Requirement

from medsilo import cli
from medsilo.check.data import SUPPRESSED, data_findings, data_tables, shown_counts
from medsilo.check.demands import source_of
from medsilo.check.kit import check_certificates, check_network, check_seal, read_kit
from medsilo.check.machine import check_environment, kept, required_versions
from medsilo.check.rehearsal import Rehearsal, rehearsal_findings, round_seconds
from medsilo.check.result import Finding, Report
from medsilo.check.site_check import Visit, check
from medsilo.core.errors import MedsiloError
from medsilo.plan import parse_plan
from medsilo.site.job_code import JobCode
from medsilo.site.policy import EXECUTOR, HARMLESS
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import parts_by_rank
from medsilo.tasks.survey import PartFacts, Problem, Severity, Survey
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan, over_all
from tests.hospital import (
    NAMES,
    Volume,
    affine_of,
    ball,
    write_balls,
    write_photos,
    write_pixels,
    write_table,
    write_volume,
)
from tests.sites import CPU, site_of
from tests.unit.federation.test_protection import STUDY
from tests.unit.medsilo_lab.test_provision import kits_of
from tests.unit.medsilo_papers.test_nuclei import draw
from tests.unit.project.test_docs import commands
from tools import dependencies
from tools.tables import checks

SMALL = ["task.persons=6", "task.windows=6", "task.steps=32", "training.batch_size=8", "training.rounds=4"]
PLAN = make_plan("fedavg", *SMALL)
GB = 1 << 30
RELAY = "nvflare.app_common.widgets.metric_relay.MetricRelay"
NOW = datetime.now(UTC)


def visit(**changes: object) -> Visit:
    good = Visit(
        SITES[0],
        PLAN,
        required={"psutil": psutil.__version__},
        free_disk=lambda path: 100 * GB,
        free_memory=lambda compute: 100 * GB,
    )
    return replace(good, **changes)


def found(report: Report, where: str, severity: str) -> list[Finding]:
    """Return the findings of a topic; each topic of the report has a description for the documentation."""
    assert {finding.where for finding in report.findings} <= checks().keys()
    return [finding for finding in report.findings if (finding.where, finding.severity) == (where, severity)]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "kit/local"
    folder.mkdir(parents=True)
    (folder / "medsilo.yaml").write_text("device: cpu\n")
    return folder


def job_of(folder: Path, *changes: str, task: dict | None = None, sites: list[str] | None = None) -> Path:
    plan = make_plan("fedavg", *SMALL, *changes)
    if task:
        values = {"algorithm": {"name": "fedavg"}, "task": task, "participation": {"sites": sites}}
        plan = parse_plan({**values, "training": {"rounds": 2, "batch_size": 8}})
    write_job(folder, plan)
    return folder


# ---------------------------------------------------------------------------------------------------- the command
def test_a_good_site_may_go(tmp_path: Path, local: Path, capsys: pytest.CaptureFixture) -> None:
    private = tmp_path / "check.txt"
    arguments = ["check", str(job_of(tmp_path / "job")), "--site", SITES[0], "--settings", str(local)]
    arguments += ["--json", "--private", str(private)]
    assert cli.main(arguments) == 0
    heard = capsys.readouterr()
    told, text = json.loads(heard.out), heard.err
    assert told["go"] is True and told["schema"] == 1 and told["site"] == SITES[0]
    assert {finding["severity"] for finding in told["findings"]} <= {"ok", "note"}
    places = [finding["where"] for finding in told["findings"]]
    assert {"settings", "environment", "disk", "device", "data", "memory", "time"} <= set(places)
    tables = {table["title"]: table["rows"] for table in told["tables"]}
    data = PLAN.task.load(SITES[0], SITES, PLAN.seed, None)
    assert [row["cases"] for row in tables["Cases"]] == [len(data.train), len(data.validation), len(data.test)]
    assert [row["patients"] for row in tables["Cases"]] == [len(set(part.patients)) for part in parts(data)]
    counts = {int(row["class"]): row["train"] for row in tables["Cases of each class"]}
    labels = data.train.targets.tolist()
    assert counts == {label: labels.count(label) for label in counts} and sum(counts.values()) == len(labels)
    assert not private.exists()
    assert text.splitlines()[-1].startswith("GO: nothing stops this site")
    assert "hospital-a" in text and str(tmp_path) not in text


def parts(data: object) -> list:
    return [getattr(data, part) for part in ("train", "validation", "test")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        ["JOB"],
        ["JOB", "--site", "a/b"],
        ["JOB", "--site", "hospital-a", "--kit", "EMPTY"],
        ["JOB", "--site", "hospital-a", "--settings", "nowhere"],
        ["JOB", "--site", "hospital-a", "--set", "training.rounds=0"],
        ["--set", "training.rounds=2"],
        ["--plan", "nowhere.yaml", "--site", "hospital-a"],
        ["--unknown"],
        ["--kit", "EMPTY", "--settings", "EMPTY"],
        ["--private", "EMPTY"],
        ["--json", "check.json"],
    ],
)
def test_wrong_use_is_2(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    places = {"JOB": str(job_of(tmp_path / "job")), "EMPTY": str(tmp_path)}
    assert cli.main(["check", *(places.get(argument, argument) for argument in arguments)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_without_a_job_the_machine_is_looked_at(local: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["check", "--settings", str(local)]) == 0
    text = capsys.readouterr().out
    assert "no job was given" in text
    assert text.splitlines()[-1].startswith("READY: nothing stops this machine") and "GO" not in text


def test_a_data_folder_that_is_not_there_stops_without_a_job_too(
    local: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = ["--settings", str(local), "--private", str(tmp_path / "private.txt")]
    assert cli.main(["check", *given, "--data", str(tmp_path / "mueller-johann")]) == 1
    text = capsys.readouterr().out
    assert "STOPS  data" in text and "the data folder does not exist" in text and "mueller" not in text
    assert text.splitlines()[-1].startswith("NO-GO: 1 finding must be settled first")


@pytest.mark.parametrize(
    ("output", "data", "told"),
    [
        ("own", "own", 1),
        ("linked", "own", 1),
        ("own/results", "own", 1),
        ("results", "own", 0),
        (None, "kit/medsilo", 1),
    ],
)
def test_results_among_the_data_are_noted(
    output: str | None, data: str, told: int, local: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / data).mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "own")
    own = {"device": "cpu", "data": str(tmp_path / data)} | ({"output": str(tmp_path / output)} if output else {})
    (local / "medsilo.yaml").write_text(json.dumps(own))
    assert cli.main(["check", "--settings", str(local), "--private", str(tmp_path / "private.txt")]) == 0
    text = capsys.readouterr().out
    assert text.count("note   disk         the folder for results is, or lies in, the folder of the data set") == told
    assert str(tmp_path) not in text


# ---------------------------------------------------------------------------------------------------- the machine
def test_packages_that_are_missing_or_others() -> None:
    missing = list(check_environment({"no-such-package": "1.0"}))
    assert [f.severity for f in missing] == ["stops", "ok"] and "no-such-package is missing" in missing[0].what
    assert missing[0].remedy == "pip install no-such-package==1.0"
    other = list(check_environment({"numpy": "0.1", "PyYAML": "0.2"}))
    assert [f.severity for f in other] == ["note", "ok"]
    assert f"numpy {np.__version__} (0.1)" in other[0].what and "PyYAML" in other[0].what
    assert [f.severity for f in check_environment({"nvflare": "9.8.7"})] == ["stops", "ok"]
    assert [f.severity for f in check_environment({"torch": torch.__version__.partition("+")[0]})] == ["ok"]


def test_what_is_tested_is_among_what_may_be_there(root: Path) -> None:
    tested = required_versions()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    bounds = [Requirement(line) for line in project["dependencies"]]
    assert {own.name for own in bounds} == tested.keys() and "pyedflib" not in tested, (
        "an optional package must not be required"
    )
    for own in bounds:
        assert own.specifier.contains(tested[own.name]) and ">=" in str(own.specifier), own
        assert "==" not in str(own.specifier), f"{own}: give a range of versions instead of an exact version"


@over_all("file", dependencies.WRITTEN)
def test_each_version_is_said_once(file: str, root: Path) -> None:
    """Developers write each version in pyproject.toml only, and generate all other lists of versions from
    pyproject.toml.
    """
    assert (root / file).read_text("utf-8") == dependencies.text_of(file), "run: python tools/dependencies.py"
    pins = [line.partition("==")[0].lower() for line in dependencies.group_of("dev")]
    assert len(pins) == len(set(pins)) > 50


def test_a_full_disk_stops(tmp_path: Path) -> None:
    need = kept(PLAN)
    for free, severity in ((need - 1, "stops"), (need + 1, "note"), (need + 2 * GB, "ok")):
        report = check(visit(local=tmp_path, free_disk=lambda path, free=free: free))
        assert len(found(report, "disk", severity)) == 1, free
    assert not check(visit(free_disk=lambda path: 10)).go


@pytest.mark.slow
def test_what_a_run_keeps_is_no_more_than_foretold(tmp_path: Path) -> None:
    plan = make_plan("fedsm", *SMALL)
    inprocess.run(plan, folder=tmp_path, settings=CPU)
    files = list((tmp_path / "sites" / SITES[0]).rglob("*.safetensors"))
    assert len(files) >= 8
    heads = sum(int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in files)
    assert 0.2 * kept(plan) < sum(path.stat().st_size for path in files) - heads <= kept(plan)


def test_too_little_memory_stops_before_anything_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "medsilo.check.job_check.rehearse", lambda *_: pytest.fail("the rehearsal started without enough memory")
    )
    report = check(visit(free_memory=lambda compute: 1000))
    (finding,) = found(report, "memory", "stops")
    assert "1.0 kB are free" in finding.what and not report.go


def test_the_sites_own_limit_counts_this_process(local: Path) -> None:
    # memory limits in MiB; importing torch alone needs more than 256 MiB
    for limit, go in ((256, False), (100_000, True)):
        (local / "medsilo.yaml").write_text(f"device: cpu\nmemory_limit: {limit}\n")
        report = check(visit(local=local))
        assert report.go is go and bool(found(report, "memory", "stops")) is not go


def test_memory_that_ends_in_the_middle_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def bursts(*_: object) -> list:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB at /secret")

    monkeypatch.setattr("medsilo.check.job_check.rehearse", bursts)
    report = check(visit())
    (finding,) = found(report, "memory", "stops")
    assert "batch_size" in finding.remedy and "secret" not in json.dumps(report.as_json())


def test_a_plan_without_a_job_is_looked_at_too(tmp_path: Path, local: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.to_yaml())
    arguments = ["check", "--plan", str(tmp_path / "plan.yaml"), "--site", SITES[0], "--settings", str(local)]
    assert cli.main(arguments) == 0
    assert f"plan {PLAN.hash[:12]}" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- settings, policy
def test_settings_that_are_wrong_stop_and_the_rest_is_still_looked_at(local: Path) -> None:
    (local / "medsilo.yaml").write_text("device: gpu\n")
    report = check(visit(local=local))
    (finding,) = found(report, "settings", "stops")
    assert "device" in finding.what and finding.private == ()
    (read,) = found(report, "data", "ok")
    tested, margin = re.search(r"(\d+) test patients.* ± (\d+) points", read.what).groups()  # type: ignore[union-attr]
    assert int(margin) == min(round(98 / int(tested) ** 0.5), 50)


@pytest.mark.slow
def test_what_the_plan_and_the_policy_say_of_the_site(local: Path, root: Path) -> None:
    shutil.copytree(root / "site_configs/strict-hospital", local, dirs_exist_ok=True)
    (local / "medsilo.yaml").write_text("device: cpu\n")
    assert not found(check(visit(local=local)), "policy", "stops")
    harmofl = make_plan("harmofl", *SMALL)
    (held,) = found(check(visit(plan=harmofl, local=local)), "policy", "stops")
    assert "holds back amplitude" in held.what
    (local / "privacy.json").unlink()
    (local / "resources.json").write_text('{"class_allow_list": ["nvflare."]}')
    (list_,) = found(check(visit(local=local)), "policy", "stops")
    assert "class_allow_list" in list_.what
    assert not found(check(visit(local=local, code=JobCode({}))), "policy", "stops")
    resources = json.loads((root / "site_configs/teaching-hospital/resources.json").read_text())
    (promised,) = (one["args"] for one in resources["components"] if "num_of_gpus" in one["args"])
    for number, ignored in ((99, False), (99, True), (0, False)):
        promised |= {"num_of_gpus": number, "ignore_host": ignored}
        (local / "resources.json").write_text(json.dumps(resources))
        stops = found(check(visit(local=local)), "policy", "stops")
        assert ["promises 99 GPUs" in one.what for one in stops] == [True] * (number == 99 and not ignored)
    (stranger,) = found(check(visit(site="hospital-x")), "job", "stops")
    assert "not hospital-x" in stranger.what


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("resources", {"class_allow_list": [EXECUTOR, "nvflare.app_common.widgets."]}, "nvflare.app_common.widgets."),
        ("resources", {"class_allow_list": [EXECUTOR, "nvflare.app_common.widgets"]}, "nvflare.app_common.widgets"),
        ("resources", {"class_allow_list": [EXECUTOR, RELAY]}, RELAY),
        ("resources", {"class_allow_list": ["medsilo.flare."]}, "medsilo.flare."),
        ("resources", {"class_allow_list": ["*"]}, "has *"),
        ("resources", {"class_allow_list": [EXECUTOR], "class_list_enforcement_mode": "warn"}, "is not enforce"),
        ("resources", {"format_version": 2}, "NVFlare's own holds"),
        ("authorization", {"permissions": {"lead": {"byoc": "o:site"}, "member": {}}}, "lets lead send code"),
    ],
)
@pytest.mark.parametrize("promise", ["approval: required\n", "privacy: {epsilon: 3, delta: 1.0e-5}\n", ""])
def test_a_list_that_makes_promises_void_stops(local: Path, name: str, values: dict, words: str, promise: str) -> None:
    """NVFlare's MetricRelay could delete any file, even medsilo.yaml with the hospital's privacy settings."""
    (local / "medsilo.yaml").write_text(f"device: cpu\n{promise}")
    (local / f"{name}.json").write_text(json.dumps(values))
    stops = [one.what for one in found(check(visit(plan=None, local=local)), "policy", "stops")]
    assert [words in one for one in stops] == ([True] if promise else [])
    (local / f"{name}.json").write_text("{}")
    if name == "resources":
        own = {"class_allow_list": [EXECUTOR, "st_anna.filters.Blurred", HARMLESS[1]]}
        (local / "resources.json").write_text(json.dumps(own))
    assert not found(check(visit(plan=None, local=local)), "policy", "stops")


def test_an_average_of_too_few_images_stops(local: Path) -> None:
    (local / "medsilo.yaml").write_text("device: cpu\nmin_patients_per_metric: 500\n")
    report = check(visit(plan=make_plan("harmofl", *SMALL), local=local))
    (finding,) = found(report, "rehearsal", "stops")
    assert "demands 500" in finding.what


# ---------------------------------------------------------------------------------------------------- kits
class Root:
    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self.sign("root", self.key, authority=True)

    def sign(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        start: datetime = NOW - timedelta(days=10),
        end: datetime = NOW + timedelta(days=350),
        authority: bool = False,
    ) -> x509.Certificate:
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, "root"))
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)
        builder = builder.add_extension(x509.BasicConstraints(authority, None), critical=True)
        return builder.sign(self.key, hashes.SHA256())


ROOT = Root()


def pem(thing: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.PKCS8
    return thing.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def kit_of(folder: Path, name: str = SITES[0], port: int = 1, root: Root = ROOT, **dates: datetime) -> Path:
    (folder / "startup").mkdir(parents=True)
    (folder / "local").mkdir()
    (folder / "local/medsilo.yaml").write_text("device: cpu\n")
    key = ec.generate_private_key(ec.SECP256R1())
    content = {
        "client.key": pem(key),
        "client.crt": pem(root.sign(name, key, **dates)),
        "rootCA.pem": pem(root.certificate),
    }
    for file, text in content.items():
        (folder / "startup" / file).write_bytes(text)
    (folder / "startup/client.key").chmod(0o600)
    client = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem", "fqsn": name}
    start = {
        "servers": [{"identity": "localhost", "service": {"target": f"127.0.0.1:{port}", "scheme": "tcp"}}],
        "client": client,
    }
    (folder / "startup/fed_client.json").write_text(json.dumps(start))
    return folder


def severities(kit: Path) -> dict[str, str]:
    return {finding.what: finding.severity for finding in check_certificates(read_kit(kit), NOW)}


@pytest.mark.parametrize(
    ("dates", "severity", "words"),
    [
        ({"end": NOW - timedelta(days=1)}, "stops", "the kit's certificate ended on"),
        ({"end": NOW + timedelta(days=12, hours=1)}, "note", "12 days"),
        ({"start": NOW + timedelta(days=2)}, "stops", "is valid from"),
    ],
)
def test_certificates_that_end(dates: dict, severity: str, words: str, tmp_path: Path) -> None:
    told = severities(kit_of(tmp_path / "kit", **dates))
    assert [what for what, kind in told.items() if kind == severity and words in what]


def test_certificates_of_others(tmp_path: Path) -> None:
    kit = kit_of(tmp_path / "kit")
    others = kit_of(tmp_path / "other", root=Root())
    shutil.copy(others / "startup/rootCA.pem", kit / "startup/rootCA.pem")
    assert severities(kit)["the certificate is not of the kit's root"] == "stops"
    kit = kit_of(tmp_path / "keys")
    shutil.copy(others / "startup/client.key", kit / "startup/client.key")
    (kit / "startup/client.key").chmod(0o644)
    told = severities(kit)
    assert told["the private key is not the certificate's"] == "stops"
    assert told[next(what for what in told if "private key" in what and "accounts" in what)] == "note"
    kit = kit_of(tmp_path / "name")
    start = json.loads((kit / "startup/fed_client.json").read_text())
    start["client"]["fqsn"] = "hospital-b"
    (kit / "startup/fed_client.json").write_text(json.dumps(start))
    assert severities(kit)["the certificate is another party's than the kit"] == "stops"
    (kit / "startup/client.crt").write_text("no certificate")
    assert "stops" in severities(kit).values()


def test_a_kit_that_was_edited_is_found_before_nvflare_does(tmp_path: Path) -> None:
    kits_of(tmp_path)
    kit = tmp_path / "kits/north"
    (sealed,) = check_seal(read_kit(kit))
    assert sealed.severity == "ok"
    start = kit / "startup/fed_client.json"
    start.write_text(start.read_text().replace("localhost:8002", "localhost:8003"))
    (kit / "startup/stop_fl.sh").unlink()
    (broken,) = check_seal(read_kit(kit))
    assert broken.severity == "stops" and "fed_client.json, stop_fl.sh in startup/ changed" in broken.what
    assert not list(check_seal(read_kit(kit_of(tmp_path / "unsigned"))))


def test_what_is_no_kit(tmp_path: Path) -> None:
    with pytest.raises(MedsiloError, match="is not a kit"):
        read_kit(tmp_path)
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup/fed_client.json").write_text('{"servers": []}')
    with pytest.raises(MedsiloError, match="damaged"):
        read_kit(tmp_path)


@contextmanager
def serving(root: Root | None) -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        context = None
        if root:
            key = ec.generate_private_key(ec.SECP256R1())
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            with _files(root.sign("server", key), key) as (certificate, private):
                context.load_cert_chain(certificate, private)
            context.verify_mode = ssl.CERT_REQUIRED
            with _files(root.certificate, key) as (authority, _):
                context.load_verify_locations(authority)

        def serve() -> None:
            try:
                plain, _ = listener.accept()
                with plain:
                    if context:
                        context.wrap_socket(plain, server_side=True).close()
                    else:
                        plain.recv(10)
                        plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
    thread.join(60)


@contextmanager
def _files(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Iterator[tuple[Path, Path]]:
    with TemporaryDirectory() as folder:
        paths = Path(folder) / "c.pem", Path(folder) / "k.pem"
        for path, thing in zip(paths, (certificate, key), strict=True):
            path.write_bytes(pem(thing))
        yield paths


def test_the_server_at_the_other_end(tmp_path: Path) -> None:
    with serving(ROOT) as port:
        finding = check_network(read_kit(kit_of(tmp_path / "good", port=port)))
        assert finding.severity == "ok" and f"127.0.0.1:{port}" in finding.what
    closed = check_network(read_kit(kit_of(tmp_path / "closed", port=port)))
    assert closed.severity == "stops" and "does not answer" in closed.what
    with serving(Root()) as port:
        other = check_network(read_kit(kit_of(tmp_path / "other", port=port)))
        assert other.severity == "stops" and "another root" in other.what
    with serving(None) as port:
        plain = check_network(read_kit(kit_of(tmp_path / "plain", port=port)))
        assert plain.severity == "stops" and "makes no TLS connection" in plain.what


def test_the_whole_check_with_a_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # the check writes a private file into the current folder
    job = job_of(tmp_path / "job")
    with serving(ROOT) as port:
        kit = kit_of(tmp_path / "kit", port=port)
        assert cli.main(["check", str(job), "--kit", str(kit)]) == 0
    with serving(ROOT) as port:
        kit = kit_of(tmp_path / "old", port=port, end=NOW - timedelta(days=3))
        assert cli.main(["check", str(job), "--kit", str(kit)]) == 1
    assert "STOPS  certificates  the kit's certificate ended on" in capsys.readouterr().out
    assert cli.main(["check", "--kit", str(kit.rename(tmp_path / "our kit"))]) == 1
    assert "STOPS  environment   NVFlare can't use a path that has ' '" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- rehearsals
def test_the_time_and_memory_of_a_round_by_hand() -> None:
    plan = make_plan("fedavg", "training.local_epochs=3", "training.batch_size=16", "training.rounds=5")
    one = Rehearsal("train", 5, 0.5, 0.1, 1000)
    cases = {"train": 40, "validation": 20, "test": 7}
    # an epoch of 40 training cases has batches of 16, 16 and 8 cases
    assert round_seconds(one, plan, cases) == pytest.approx(3 * 3 * 0.5 + 20 * 0.1)
    memory, time = rehearsal_findings([one], plan, cases, 10_000)
    assert (memory.severity, time.severity) == ("ok", "ok") and "about 6.5 s" in time.what and "32 s" in time.what
    assert [f.severity for f in rehearsal_findings([one], plan, cases, 1100)] == ["note", "ok"]
    assert [f.severity for f in rehearsal_findings([one], plan, cases, 999)] == ["stops", "ok"]
    for timeout, severity in ((6, "stops"), (8, "note"), (14, "ok")):
        hurried = plan.with_changes([f"participation.timeout={timeout}"])
        assert (
            next(f for f in rehearsal_findings([one], hurried, cases, 10_000) if f.where == "time").severity == severity
        )


# ---------------------------------------------------------------------------------------------------- data
def test_small_counts_are_not_told() -> None:
    assert shown_counts([10, 4, 3, 0], 5, exclusive=True) == [10, "fewer than 5", "fewer than 5", 0]
    # The next smallest count is also suppressed, because readers could compute a single suppressed count from the
    # total.
    assert shown_counts([10, 7, 3, 0], 5, exclusive=True) == [10, SUPPRESSED, "fewer than 5", 0]
    assert shown_counts([10, 7, 3], 5, exclusive=False) == [10, 7, "fewer than 5"]
    assert shown_counts([3], 5, exclusive=True) == ["fewer than 5"]
    assert shown_counts([2, 1], 1, exclusive=True) == [2, 1]


def test_few_patients_of_a_part_are_not_on_the_screen() -> None:
    """A hospital may mail the text on the screen to the lead, so numbers of few patients are suppressed."""
    plan = parse_plan({"algorithm": {"name": "fedavg"}, "task": BALLS, "participation": {"sites": ["a"]}})
    parts = {"train": (26, 24), "validation": (4, 4), "test": (30, 3)}
    survey = Survey({name: PartFacts(cases, patients, {}) for name, (cases, patients) in parts.items()})
    table = next(table for table in data_tables(survey, plan, 5) if table.title == "Cases")
    few = "fewer than 5"
    assert [list(row) for row in table.rows] == [["train", 26, 24], ["validation", few, few], ["test", 30, few]]
    said = " ".join(finding.what for finding in data_findings(survey, plan, 5))
    assert few in said and " 4 " not in said and "3 test patients" not in said


@pytest.mark.parametrize("severity", get_args(Severity))
def test_a_problem_of_few_patients_has_one_public_text(severity: Severity) -> None:
    """A problem's public text must not change with a number of patients below `min_patients_per_metric`."""
    plan = parse_plan({"algorithm": {"name": "fedavg"}, "task": BALLS, "participation": {"sites": ["a"]}})

    def mailed(patients: int) -> str:
        problem = Problem(severity, "patients have no age; add it", patients, ("Müller",) * patients)
        report = Report({}, [*data_findings(Survey({}, problems=(problem,)), plan, 5)])
        return report.as_text() + json.dumps(report.as_json())

    few = {mailed(patients) for patients in (1, 2, 4)}
    assert len(few) == 1 and "patients have no age (fewer than 5)" in few.pop()
    assert "patients have no age (5)" in mailed(5) and "patients have no age (" not in mailed(0)


def windows(folder: Path, **changes: np.ndarray) -> Path:
    """Write random sensor windows for a site, which suffice because the check does not judge whether values are
    plausible.
    """
    random = np.random.default_rng(0)
    content = {
        "x_train": random.normal(size=(60, 9, 16)).astype(np.float32),
        "y_train": np.arange(60) % 6,
        "x_test": random.normal(size=(30, 9, 16)).astype(np.float32),
        "y_test": np.arange(30) % 6,
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "hospital-a.npz", **{**content, **changes})
    return folder


WINDOWS = {"name": "activity-windows"}


def look(folder: Path, task: dict, site: str, least: int = 1) -> Report:
    values = {"algorithm": {"name": "fedavg"}, "task": task, "participation": {"sites": [site]}}
    plan = parse_plan({**values, "training": {"rounds": 1, "batch_size": 8}})
    settings = folder.parent / "local"
    settings.mkdir(exist_ok=True)
    (settings / "medsilo.yaml").write_text(f"device: cpu\nmin_patients_per_metric: {least}\n")
    return check(visit(site=site, plan=plan, source=DataSource(folder=folder), local=settings))


def test_good_windows_go(tmp_path: Path) -> None:
    report = look(windows(tmp_path / "d"), WINDOWS, "hospital-a")
    assert report.go, [finding for finding in report.findings if finding.severity == "stops"]
    (finding,) = found(report, "data", "note")
    assert "patients are in two parts" in finding.what and "has it so" in finding.remedy


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ({"y_train": np.full(60, 9)}, "stops", "labels outside 0 to 5"),
        ({"x_train": np.full((60, 9, 16), np.nan, np.float32)}, "stops", "NaN"),
        ({"y_train": np.zeros(60, int)}, "note", "one class only"),
        ({"y_train": np.arange(60) % 3}, "note", "3 of the task's 6 classes"),
        ({"y_train": np.r_[np.zeros(54, int), np.arange(6)]}, "note", "times the cases of its smallest"),
        ({"x_test": np.ones((30, 9, 16), np.float32)}, "note", "there twice"),
    ],
)
def test_faults_of_windows(changes: dict, severity: str, words: str, tmp_path: Path) -> None:
    report = look(windows(tmp_path / "d", **changes), WINDOWS, "hospital-a")
    assert [f for f in found(report, "data", severity) if words in f.what], report.findings
    assert report.go is (severity != "stops")


@pytest.mark.slow
@pytest.mark.parametrize(("own", "counts"), [({}, []), ({"naevus": "benign"}, ["benign", "malignant"])])
def test_labels_that_the_plan_lacks_are_no_class_of_it(own: dict, counts: list[str], tmp_path: Path) -> None:
    """The check reports labels that the plan lacks, but does not disclose which class has no patients."""
    folder = tmp_path / "photos"
    for number in range(40):
        path = folder / ("naevus" if number % 2 else "melanoma") / f"{number}.png"
        write_pixels(path, np.full((16, 16, 3), number, np.uint8))
    values = {"name": "image-folder", "kind": "classification", "labels": ["benign", "malignant"], "size": [64, 64]}
    plan = parse_plan({"algorithm": {"name": "fedavg"}, "task": values, "participation": {"sites": ["a"]}})
    source = DataSource(folder=folder, images="*/*.png", label_map=own)
    report = check(visit(site="a", plan=plan, source=source))
    (stop,) = found(report, "data", "stops")
    assert "label_map: {your name: benign}" in stop.remedy
    tables = {table.title: table.rows for table in report.tables}
    assert [row[0] for row in tables.get("Cases of each class", ())] == counts
    assert all(row[1] == 0 for row in tables.get("Cases of each class", ()) if row[0] == "malignant")
    assert not any("one class" in finding.what for finding in report.findings)


# ---------------------------------------------------------------------------------------------------- volumes
BALLS = {"name": "nifti-folder", "labels": ["ball"], "size": [16, 16, 8], "target_spacing": [2, 2, 3]}
SECRETS = [f"Müller Johann {number}" for number in range(12)]


@pytest.fixture
def balls(tmp_path: Path) -> Path:
    return write_balls(tmp_path / "Klinik Dr. Geheim", SECRETS)


@pytest.mark.parametrize(
    ("patients", "words"),
    [
        (12, "validation and test: fewer than 5 patients"),
        (16, "validation and test: fewer than 5 patients"),
        (40, "validation and test: fewer than 10 patients"),
        (50, ""),
    ],
)
def test_small_parts_are_said_to_be_small(patients: int, words: str) -> None:
    parts = parts_by_rank({f"p{number}": "" for number in range(patients)}, (0.6, 0.2, 0.2), 0)
    told = {part: PartFacts(own, own, {}) for part, own in Counter(parts.values()).items()}
    plan = parse_plan({"algorithm": {"name": "fedavg"}, "task": BALLS, "participation": {"sites": ["a"]}})
    notes = [finding for finding in data_findings(Survey(told), plan, 5) if finding.severity == "note"]
    assert [finding.what.startswith(words) for finding in notes] == [True] * bool(words)


def spoil(folder: Path) -> None:
    images, labels = ([folder / kind / f"{name}.nii.gz" for name in SECRETS] for kind in ("images", "labels"))
    images[0].write_bytes(images[0].read_bytes()[:900])
    volume, mask = ball((12, 24, 20), (1.5, 1.5, 2.5), 1)
    write_volume(labels[1], Volume(mask[:, :20], affine_of((1.5, 1.5, 2.5))), "RAS")
    volume[3, 4, 5] = np.nan
    write_volume(images[2], Volume(volume, affine_of((1.5, 1.5, 2.5))), "RAS")
    write_volume(labels[3], Volume(0 * mask, affine_of((1.5, 1.5, 2.5))), "RAS")
    labels[4].unlink()
    shutil.copy(images[6], images[5])
    images[7].unlink()
    (folder.parent / "outside").mkdir()
    shutil.copy(images[8], folder.parent / "outside/x.nii.gz")
    images[7].symlink_to(folder.parent / "outside/x.nii.gz")


def test_every_fault_of_a_folder_is_in_the_table_without_a_name(balls: Path, tmp_path: Path) -> None:
    spoil(balls)
    # the split is fixed, because some splits would put only faulty cases into the test data
    report = look(balls, {**BALLS, "split": 1}, "hospital-a")
    notes = " | ".join(finding.what for finding in report.findings if finding.severity == "note")
    for words in ("damaged", "NaN", "masks are empty", "no label", "there twice", "lead out of it", "different sizes"):
        assert words in notes, (words, notes)
    assert report.go
    mailed = json.dumps(report.as_json(), ensure_ascii=False) + report.as_text()
    for name in ("Müller", "M\u00fcller", "Johann", "Geheim", "outside", str(tmp_path), ".nii"):
        assert name not in mailed, name
    private = "\n".join(name for finding in report.findings for name in finding.private)
    assert all(SECRETS[number] in private for number in (0, 1, 2, 3, 4, 7))
    (cases,) = [table for table in report.tables if table.title == "Cases"]
    assert sum(int(row[1]) for row in cases.rows) == 7
    (ranges,) = [table for table in report.tables if table.title == "Ranges"]
    told = {row[0]: row[1:] for row in ranges.rows}
    assert told["spacing z, mm"] == [2.5, 2.5] and told["size x, voxels"] == [20, 20]


def test_a_hospital_with_too_few_patients_reads_what_to_do(balls: Path) -> None:
    (stop,) = found(look(balls, BALLS, "hospital-a", least=32), "rehearsal", "stops")
    assert "min_patients_per_metric" in stop.what and "lower it" in stop.remedy


@pytest.mark.slow
def test_the_hospitals_limits_are_told_and_what_is_left(tmp_path: Path) -> None:
    photos, kit = write_photos(tmp_path / "photos", NAMES), tmp_path / "kit"
    (kit / "local").mkdir(parents=True)
    own = f"device: cpu\ndata: {photos}\nanswers: 12\n"
    (kit / "local/medsilo.yaml").write_text(own)
    plan = parse_plan(STUDY, ["training.rounds=9", "task.shares=[0.5,0.25,0.25]"])

    def looked() -> Report:
        return check(visit(site="a", plan=plan, local=kit / "local"))

    before = looked()
    assert before.go and not (kit / "medsilo").exists()
    settings = SiteSettings.read(kit / "local")
    inprocess.run(plan, folder=kit / "medsilo/study", settings=settings)
    after = looked()
    told = [note.what for note in found(after, "quotas", "note")]
    assert ["asks for 11 answers" in told[0], "asks for 1 answers" in told[1]] == [True, True]
    data = site_of(plan, "a", ["a"], settings, kit / "medsilo/study/sites/a").participant.disclosure.cases
    (cases,) = [table for table in after.tables if table.title == "Cases"]
    assert {row[0]: row[1] for row in cases.rows} == data  # the check and the study split the patients in the same way
    tight = replace(visit(site="a", local=kit / "local"), plan=plan.with_changes(["training.learning_rate=1e-7"]))
    (stop,) = found(check(tight), "quotas", "stops")
    assert "next to nothing" in stop.what


def test_a_patient_in_two_parts_stops_and_is_not_named(balls: Path) -> None:
    parts = ("train", "validation", "test")
    rows = [
        {
            "image": f"images/{name}.nii.gz",
            "label": f"labels/{name}.nii.gz",
            "patient": SECRETS[0] if place < 2 else name,
            "part": parts[place % 3],
        }
        for place, name in enumerate(SECRETS)
    ]
    write_table(balls / "cases.csv", rows)
    report = look(balls, BALLS, "hospital-a")
    (finding,) = found(report, "data", "stops")
    assert "two parts" in finding.what and SECRETS[0] in finding.private
    assert "ller" not in json.dumps(report.as_json())


# ---------------------------------------------------------------------------------------------------- nobody is named
@pytest.mark.parametrize("broken", [False, True])
def test_what_may_be_mailed_names_nobody(broken: bool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = draw(tmp_path / "MUELLER Johann 1958-03-02", ["tnbc"], images=8)
    planted = "4711_0"
    for kind in ("images", "masks"):
        path = folder / "tnbc" / kind
        (path / "1001_0.png").rename(path / f"{planted}.png")
    if broken:
        (folder / f"tnbc/masks/{planted}.png").write_bytes(b"cut off")
    task = {"name": "nuclei", "size": 32}
    job = job_of(tmp_path / "job", task=task, sites=["tnbc"])
    local = tmp_path / "local-of-Dr-Schmidt"
    local.mkdir()
    (local / "medsilo.yaml").write_text(
        f"device: cpu\ndata: {folder}\noutput: {tmp_path}/results-Schmidt\nmin_patients_per_metric: 1\n"
    )
    private = tmp_path / "check.txt"
    arguments = ["check", str(job), "--site", "tnbc", "--settings", str(local)]
    arguments += ["--json", "--private", str(private)]
    assert cli.main(arguments) == int(broken)
    heard = capsys.readouterr()
    screen = [line for line in heard.err.splitlines() if not line.startswith("names of files and patients, for this")]
    assert json.loads(heard.out)["go"] is not broken
    for text in (heard.out, "\n".join(screen)):
        for name in ("MUELLER", "Johann", "1958", planted, "4711", "Schmidt", str(tmp_path), "/tmp/"):
            assert name not in text, name
    assert private.exists() is broken
    if broken:
        assert planted in private.read_text() and private.stat().st_mode & 0o077 == 0


def test_an_unexpected_error_tells_its_kind_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def bursts(*_: object) -> list:
        raise KeyError("/data/mueller/4711.nii.gz")

    monkeypatch.setattr("medsilo.check.job_check.rehearse", bursts)
    report = check(visit())
    (finding,) = found(report, "rehearsal", "stops")
    assert finding.what == "it failed with KeyError"
    assert "mueller" not in json.dumps(report.as_json()) + report.as_text()
    assert any("4711" in line for line in finding.private)


def test_a_site_is_checked_with_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """If the settings folder has a subfolder with a site's name, the check uses the settings in this subfolder."""
    for site in ("north", "south"):
        rows = [{"age": number, "label": number % 2, "patient": f"{site}{number}"} for number in range(30)]
        write_table(tmp_path / site / "own.csv", rows)
        (tmp_path / "study" / site).mkdir(parents=True)
    task = {"name": "table", "kind": "classification", "target": "label", "labels": ["no", "yes"], "columns": ["age"]}
    values = {"algorithm": {"name": "fedavg"}, "task": task, "participation": {"sites": ["north", "south"]}}
    write_job(tmp_path / "job", parse_plan({**values, "training": {"rounds": 1, "batch_size": 8}}))
    (tmp_path / "study" / "medsilo.yaml").write_text("device: cpu\n")
    for site in ("north", "south"):
        own = f"device: cpu\ndata: {{folder: {tmp_path / site}, table: own.csv, label_map: {{0: 'no', 1: 'yes'}}}}\n"
        (tmp_path / "study" / site / "medsilo.yaml").write_text(own)
    command = ["check", str(tmp_path / "job"), "--settings", str(tmp_path / "study"), "--site"]
    private = ["--private", str(tmp_path / "private.txt")]
    assert cli.main([*command, "south", *private]) == 0
    assert cli.main([*command, "elsewhere", *private]) == 1, "the settings of this site name no data"
    capsys.readouterr()


def test_the_split_that_is_checked_is_the_one_that_runs(tmp_path: Path) -> None:
    """If one person owns all sites, the check splits the patients as the plan says.

    A hospital splits its patients at random once, and the check uses the stored split.
    """
    plan = parse_plan(STUDY)
    settings = SiteSettings(data=tmp_path)
    for _ in range(2):
        here = source_of(plan, settings, None, at_hospital=False)
        assert here and (here.split, here.shares) == (None, None)
    book = QueryBudget(tmp_path / "kit" / "medsilo" / "hospital" / "a")
    own = [source_of(plan, settings, book) for _ in range(2)]
    assert own[0] and own[1] and own[0].split == own[1].split == book.number("split")


@pytest.mark.slow
def test_the_hospital_s_guide_works_on_a_fresh_kit(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """All commands of the hospital's guide up to the study work as printed, except that the test replaces the path of
    the data.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("jobs", "provisioning", "site_configs"):
        Path(name).symlink_to(root / name)
    assert cli.main(["kits", "make", "provisioning/consortium.yaml", "-o", "kits"]) == 0
    write_balls(tmp_path / "data/kidney", NAMES[:20])
    Path("st-anna").symlink_to("kits/st-anna")
    Path("job").symlink_to(root / "jobs/fedavg")
    settings = tmp_path / "kits/st-anna/local/medsilo.yaml"
    text = settings.read_text().replace("/srv/medsilo/data", str(tmp_path / "data/sets/kidney-2026"))
    settings.write_text(text.replace("/srv/medsilo/results", str(tmp_path / "results")))
    typed = [line for line in dict.fromkeys(commands(root / "docs/study/join.md")) if "study/job" not in line]
    asked = [line for line in typed if not re.match("approve [0-9a-f]{8}", line)]
    acts = ["data", "data", "check", "disclosure", "run", "predict", "ledger", "prune", "approve"]
    assert [line.partition(" ")[0] for line in asked] == acts and len(asked) + 2 == len(typed)
    typed = asked
    for line in typed:
        capsys.readouterr()
        words = shlex.split(line.replace(" /data/", f" {tmp_path}/data/"))
        words += ["--set", "patients=each image is a patient"] * (words[0] == "data" and words[1] != "accept")
        if words[0] == "predict":  # prediction needs a model, which only a study creates
            continue
        code = cli.main([*words, *(["--json"] if words[0] == "check" else [])])
        if words[0] == "check":
            stops = [
                one["where"] for one in json.loads(capsys.readouterr().out)["findings"] if one["severity"] == "stops"
            ]
            missing = {"network"} if shutil.which("bwrap") else {"network", "airlock"}
            assert set(stops) <= missing, "only the missing server and a missing program may stop the check"
        else:
            assert code == 0, line


@pytest.mark.slow
def test_a_kit_is_checked_without_what_trains(tmp_path: Path) -> None:
    """`medsilo check --kit` runs without PyTorch, whose import takes a second of processor time."""
    kits_of(tmp_path)
    program = "import sys; from medsilo import cli; cli.main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, "check", "--kit", str(tmp_path / "kits/north")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "device" in done.stdout and "certificates" in done.stdout and done.stdout.splitlines()[-1] == "False"
