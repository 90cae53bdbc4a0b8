"""One root certificate signs all kits, each kit is complete and private, and adding a party changes no other kit."""

import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import NameOID
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import Job
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler

from medsilo.check.hospital_checks import files_of
from medsilo.check.kit import check_certificates, check_seal, read_kit
from medsilo.core.errors import MedsiloError
from medsilo.site.kit import BEFORE
from medsilo.site.signing import UseKey, public_text, read_pair
from medsilo_lab.consortium.description import read_consortium
from medsilo_lab.consortium.lead import connected
from medsilo_lab.consortium.provision import CONNECTIONS, provision, write_requests
from medsilo_lab.jobs import CONTROLLER
from tests.conftest import mounted
from tests.unit.medsilo_lab.test_consortium import NORTH, TOP, put, write

SOUTH = {"name": "south", "organisation": "south", "contact": "it@south.org", "policies": "policies"}


def kits_of(folder: Path, *changes: Any, renew: tuple[str, ...] = (), new_key: bool = False) -> list[str]:
    def change(values: dict[str, Any]) -> None:
        for one in changes:
            one(values)

    return provision(read_consortium(write(folder, change)), folder / "kits", renew, new_key)


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def without_seals(files: dict[Path, tuple[bytes, int]]) -> dict[Path, tuple[bytes, int]]:
    """Leave out the files of signatures, which are random and differ each time."""
    return {path: content for path, content in files.items() if path.name != "signature.json"}


def certificate(kit: Path) -> x509.Certificate:
    name = "server.crt" if (kit / "startup/server.crt").exists() else "client.crt"
    return x509.load_pem_x509_certificate((kit / "startup" / name).read_bytes())


def root_of(kit: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes())


def test_everybody_gets_a_kit_signed_by_the_root(tmp_path: Path) -> None:
    assert kits_of(tmp_path) == ["localhost", "st-anna", "north", "lead@clinic.org"]
    kits = tmp_path / "kits"
    for name in ["localhost", "st-anna", "north", "lead@clinic.org"]:
        mine = certificate(kits / name)
        assert mine.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == name
        mine.verify_directly_issued_by(root_of(kits / name))
    alternatives = certificate(kits / "localhost").extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert alternatives.value.get_values_for_type(x509.DNSName) == ["localhost"]
    valid = root_of(kits / "north").not_valid_after_utc - root_of(kits / "north").not_valid_before_utc
    assert valid.days == 1825
    told = json.loads((kits / "north/startup/fed_client.json").read_text())
    assert told["servers"][0]["service"]["target"] == "localhost:8002"
    assert told["client"]["connection_security"] == "mtls" and told["require_signed_jobs"] is True


def test_policies_and_storage_are_in_place(tmp_path: Path) -> None:
    kits_of(tmp_path)
    kits = tmp_path / "kits"
    assert (kits / "st-anna/local/medsilo.yaml").read_text() == "device: cpu\n"
    server = json.loads((kits / "localhost/local/resources.json").read_text())
    default = json.loads((kits / "localhost/local/resources.json.default").read_text())
    assert server["class_allow_list"] == [*default["class_allow_list"], CONTROLLER]
    assert "/tmp" not in json.dumps(server) and json.dumps(server).count('"/var/lib/x/') == 2
    theirs, default = (
        json.loads((kits / "localhost/local" / name).read_text())["permissions"]
        for name in ("authorization.json", "authorization.json.default")
    )
    assert theirs.pop("lead") == {**default.pop("lead"), "app_command": "n:submitter"} and theirs == default


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "tries", "pause", "tried", "over"),
    [
        (True, 3, 31, True, False),
        (True, 3, 20, False, False),
        (True, 10_000, 31, True, False),
        (True, 7 * 24 * 120, 31, True, True),
        (False, 3, 31, False, False),
        (False, 10, 31, True, True),
    ],
)
def test_a_job_waits_a_week_for_its_hospital_and_is_tried_twice_a_minute(
    ours: bool, tries: int, pause: int, tried: bool, over: bool, tmp_path: Path
) -> None:
    """NVFlare's own job scheduler runs with the settings of the server's kit, while no hospital is connected."""
    kits_of(tmp_path)
    server = json.loads((tmp_path / "kits/localhost/local/resources.json").read_text())
    given = next(own["args"] for own in server["components"] if own["id"] == "job_scheduler")
    assert given["max_jobs"] > 1
    context, ended = FLContext(), []
    engine = SimpleNamespace(get_clients=list, new_context=lambda: nullcontext(context))
    context.get_engine = lambda: engine
    manager = SimpleNamespace(refresh_meta=lambda *given: None, set_status=lambda *given: ended.append(given))
    then = {"schedule_count": tries, "last_schedule_time": time.time() - pause}
    job = Job("job", {}, {"app": ["north"]}, then, required_sites=["north"])
    DefaultJobScheduler(**(given if ours else {})).schedule_job(manager, [job], context)
    assert bool(job.meta.get("schedule_history")) == tried and bool(ended) == over


def test_keys_are_private_and_the_root_stays_with_the_lead(tmp_path: Path) -> None:
    kits_of(tmp_path)
    kits = tmp_path / "kits"
    for folder in [kits, *kits.iterdir()]:
        assert folder.stat().st_mode & 0o077 == 0, folder
    secrets = [path for path in kits.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert len(secrets) == 5 and all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    root_key = json.loads((kits / "private-root/trial/state/cert.json").read_text())["root_pri_key"]
    elsewhere = [path for path in contents(kits) if "private-root" not in path.parts]
    assert not any(root_key.encode() in path.read_bytes() for path in elsewhere)


@pytest.mark.slow
def test_the_server_gets_further_names_with_a_renewed_certificate(tmp_path: Path) -> None:
    kits_of(tmp_path)
    others, named = contents(tmp_path / "kits/st-anna"), put("server", "other_names", ["fl2.example.org"])
    with pytest.raises(MedsiloError, match="give --renew localhost"):
        kits_of(tmp_path, named)
    assert kits_of(tmp_path, named, renew=("localhost",)) == ["localhost"]
    own = certificate(tmp_path / "kits/localhost")
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"localhost", "fl2.example.org"}
    own.verify_directly_issued_by(root_of(tmp_path / "kits/st-anna"))
    assert contents(tmp_path / "kits/st-anna") == others and kits_of(tmp_path, named) == []


def test_a_changed_kit_of_a_person_does_not_connect(tmp_path: Path) -> None:
    """NVFlare compares the files of a person's kit with the kit's signatures."""
    kits_of(tmp_path)
    kit = tmp_path / "kits/lead@clinic.org"
    path = kit / "startup/fed_admin.json"
    path.write_text(path.read_text().replace("localhost", "elsewhere"))
    with pytest.raises(MedsiloError, match=r"^NVFlare: invalid fed_admin.json: tampered"), connected(kit):
        pass


@pytest.mark.slow
def test_a_newcomer_leaves_the_others_kits_untouched(tmp_path: Path) -> None:
    kits_of(tmp_path)
    kits = tmp_path / "kits"
    (kits / "north/local/medsilo.yaml").write_text("device: cpu\nthreads: 2\n")
    before = {name: contents(kits / name) for name in ("localhost", "st-anna", "north", "lead@clinic.org")}
    assert kits_of(tmp_path, lambda values: values["hospitals"].append(SOUTH)) == ["south"]
    assert before == {name: contents(kits / name) for name in before}
    certificate(kits / "south").verify_directly_issued_by(root_of(kits / "north"))
    assert root_of(kits / "south") == root_of(kits / "north")
    assert kits_of(tmp_path, lambda values: values["hospitals"].append(SOUTH)) == []


def test_a_kit_that_was_sent_and_deleted_is_made_again_the_same(tmp_path: Path) -> None:
    kits_of(tmp_path)
    north = tmp_path / "kits/north"
    before = contents(north)
    north.rename(tmp_path / "sent")
    assert kits_of(tmp_path) == ["north"]
    assert without_seals(contents(north)) == without_seals(before)
    assert contents(north).keys() == before.keys()


def test_renewal_gives_a_new_certificate_and_keeps_the_rest(tmp_path: Path) -> None:
    """The renewed certificate is for the same key, so the key's earlier signatures remain valid."""
    everybody = ("localhost", "north", "lead@clinic.org")
    kits_of(tmp_path)
    kits = tmp_path / "kits"
    (kits / "north/local/medsilo.yaml").write_text("device: auto\n")
    old, other = {name: certificate(kits / name) for name in everybody}, contents(kits / "st-anna")
    keys = {name: read_pair_of(kits / name)[1] for name in everybody}
    assert kits_of(tmp_path, renew=everybody) == sorted(everybody)
    for name in everybody:
        new = certificate(kits / name)
        assert new.serial_number != old[name].serial_number and new.subject == old[name].subject
        assert new.not_valid_before_utc >= old[name].not_valid_before_utc
        assert [one.oid for one in new.extensions] == [one.oid for one in old[name].extensions]
        new.verify_directly_issued_by(root_of(kits / "st-anna"))
        private = read_pair_of(kits / name)[1]
        # a private key that does not belong to the certificate would raise an error
        assert public_text(private) == public_text(keys[name])
        party = read_kit(kits / name)
        assert {one.severity for one in [*check_certificates(party), *check_seal(party)]} == {"ok"}
        assert not (kits / name / BEFORE).exists()
    assert (kits / "north/local/medsilo.yaml").read_text() == "device: auto\n"
    assert contents(kits / "st-anna") == other
    (kits / "north").rename(tmp_path / "sent")
    assert kits_of(tmp_path) == ["north"]
    assert without_seals(contents(kits / "north/startup")) == without_seals(
        {kits / "north/startup" / path.name: content for path, content in contents(tmp_path / "sent/startup").items()}
    )
    with pytest.raises(MedsiloError, match="trial .* 'nort'; .*north"):
        kits_of(tmp_path, renew=("nort",))


def read_pair_of(kit: Path) -> tuple[Any, Any]:
    name = "server" if (kit / "startup/server.crt").exists() else "client"
    return read_pair(*((kit / f"startup/{name}.{kind}").read_bytes() for kind in ("crt", "key")))


def test_a_new_key_comes_with_the_one_before_which_lets_it_in(tmp_path: Path) -> None:
    kits_of(tmp_path)
    north, lead = tmp_path / "kits/north", tmp_path / "kits/lead@clinic.org"
    old, person = read_pair_of(north), read_pair_of(lead)
    assert kits_of(tmp_path, renew=("north", "lead@clinic.org"), new_key=True) == ["lead@clinic.org", "north"]
    assert public_text(read_pair_of(north)[1]) != public_text(old[1])
    assert public_text(read_pair_of(lead)[1]) != public_text(person[1]) and not (lead / BEFORE).exists()
    files = files_of(read_kit(north))
    earlier = files.earlier_key_for("approvals")
    assert earlier and public_text(earlier) == public_text(UseKey.of(old[1], "approvals"))
    assert public_text(files.key_for("approvals")) != public_text(earlier)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (north / BEFORE).iterdir() if path.suffix == ".key")
    assert kits_of(tmp_path, renew=("north",)) == ["north"] and not (north / BEFORE).exists()


def test_a_renewal_that_fails_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kits_of(tmp_path)
    kits, before = tmp_path / "kits", contents(tmp_path / "kits/north")
    state = kits / "private-root/trial/state/cert.json"
    certified = json.loads(state.read_text())
    for part in ("_build", "_complete", "_seal"):

        def fail(*given: Any) -> None:
            raise MedsiloError("the disk is full")

        with monkeypatch.context() as patch, pytest.raises(MedsiloError, match="disk is full"):
            patch.setattr(f"medsilo_lab.consortium.provision.{part}", fail)
            kits_of(tmp_path, renew=("north",))
        assert contents(kits / "north") == before and json.loads(state.read_text()) == certified


def test_a_startup_folder_that_is_a_mount_is_renewed(tmp_path: Path) -> None:
    kits_of(tmp_path)
    startup = tmp_path / "kits/north/startup"
    old = certificate(startup.parent)
    startup.rename(tmp_path / "aside")
    with mounted(startup, "1m"):
        shutil.copytree(tmp_path / "aside", startup, dirs_exist_ok=True)
        (startup / "of-an-earlier-version.json").write_text("{}")
        assert kits_of(tmp_path, renew=("north",)) == ["north"]
        assert certificate(startup.parent).serial_number != old.serial_number
        party = read_kit(startup.parent)
        assert {one.severity for one in [*check_certificates(party), *check_seal(party)]} == {"ok"}
        assert {path.name for path in startup.iterdir()} == {path.name for path in (tmp_path / "aside").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("server", "port", 9000), "in another folder"),
        (put("server", "host", "127.0.0.1"), "in another folder"),
        (put("name", "second"), "in another folder"),
        (put("root_valid_days", 100), "in another folder"),
        (put("people", 0, "role", "member"), "lead@clinic.org has a certificate as 'lead'"),
        (put("hospitals", 0, "organisation", "anna"), "st-anna has a certificate as 'st_anna'"),
    ],
)
def test_what_kits_already_say_cannot_change(change: Any, words: str, tmp_path: Path) -> None:
    kits_of(tmp_path)
    before = contents(tmp_path / "kits")
    with pytest.raises(MedsiloError, match=words):
        kits_of(tmp_path, change)
    assert contents(tmp_path / "kits") == before


def test_requests_hold_no_key_and_no_project_admin(tmp_path: Path) -> None:
    consortium = read_consortium(write(tmp_path))
    write_requests(consortium, tmp_path / "requests")
    assert yaml.safe_load((tmp_path / "requests/north/north.yaml").read_text()) == {
        "name": "trial",
        "participants": [{"name": "north", "type": "client", "org": "north"}],
    }
    assert (tmp_path / "requests/north/local/medsilo.yaml").read_text() == "device: cpu\n"
    assert not any(b"PRIVATE KEY" in content for content, _ in contents(tmp_path / "requests").values())
    admin = read_consortium(write(tmp_path, put("people", 0, "role", "project_admin")))
    with pytest.raises(MedsiloError, match="lead@clinic.org another role"):
        write_requests(admin, tmp_path / "others")
    assert not (tmp_path / "others").exists()


def test_a_hospital_behind_relays_knows_the_nearest_and_trusts_the_root(tmp_path: Path) -> None:
    """A relay has one certificate for its connection to the server, and another for hospitals that connect to the
    relay.
    """
    assert kits_of(tmp_path, put("relays", [NORTH, TOP]))[:3] == ["localhost", "relay-n", "relay-top"]
    kits = tmp_path / "kits"
    for name, host in (("relay-n", "relay.north.org"), ("relay-top", "relay.top.org")):
        listens = certificate(kits / name)
        listens.verify_directly_issued_by(root_of(kits / "north"))
        names = listens.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [host]
        where = json.loads((kits / name / "local/comm_config.json").read_text())["internal"]["resources"]
        assert where == {"host": host, "port": 8002, "connection_security": "mtls"}
        assert [finding.severity for finding in check_seal(read_kit(kits / name))] == ["ok"]
        assert {finding.severity for finding in check_certificates(read_kit(kits / name))} == {"ok"}
    north, direct, relay, top = (read_kit(kits / name) for name in ("north", "st-anna", "relay-n", "relay-top"))
    assert (north.name, north.meets, north.host, north.port) == ("north", "the relay relay-n", "relay.north.org", 8002)
    assert (relay.name, relay.meets, relay.host) == ("relay-n", "the relay relay-top", "relay.top.org")
    assert {(top.meets, top.host), (direct.meets, direct.host)} == {("the server", "localhost")}
    told = json.loads((kits / "north/local/relay__resources.json").read_text())["relay_config"]
    assert (told["fqcn"], told["connection_security"]) == ("relay-top.relay-n", "mtls")


@pytest.mark.slow
def test_a_hospital_moves_behind_a_relay_and_back_with_a_renewed_kit(tmp_path: Path) -> None:
    kits_of(tmp_path)
    north, others = tmp_path / "kits/north", contents(tmp_path / "kits/st-anna")
    with pytest.raises(MedsiloError, match="kit of north.*give --renew north"):
        kits_of(tmp_path, put("relays", [NORTH]))
    assert kits_of(tmp_path, put("relays", [NORTH]), renew=("north",)) == ["relay-n", "north"]
    assert read_kit(north).meets == "the relay relay-n" and all(
        (north / "local" / file).exists() for file in CONNECTIONS
    )
    assert kits_of(tmp_path, renew=("north",)) == ["north"]
    assert read_kit(north).meets == "the server" and not any((north / "local" / file).exists() for file in CONNECTIONS)
    assert (north / "local/medsilo.yaml").exists() and contents(tmp_path / "kits/st-anna") == others
    with pytest.raises(MedsiloError, match="no kits for relays"):
        write_requests(read_consortium(write(tmp_path, put("relays", [NORTH]))), tmp_path / "requests")


def test_project_file_is_nvflares_own(tmp_path: Path) -> None:
    kits_of(tmp_path)
    project = yaml.safe_load((tmp_path / "kits/private-root/project.yml").read_text())
    assert [participant["type"] for participant in project["participants"]] == ["server", "client", "client", "admin"]
    assert project["participants"][1]["contact"] == "it@st-anna.org"
