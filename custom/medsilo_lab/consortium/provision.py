"""Make signed startup kits from a consortium's description, with NVFlare's provisioning."""

import contextlib
import copy
import io
import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from nvflare.lighter.constants import CtxKey, ProvFileName
from nvflare.lighter.prov_utils import prepare_builders
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner
from nvflare.lighter.utils import load_private_key, sign_folders

from medsilo.core.errors import MedsiloError, YamlError
from medsilo.core.files import make_folder, write_bytes, write_json, write_text
from medsilo.core.yaml_text import load_yaml
from medsilo.site.kit import BEFORE, HOSPITALS
from medsilo.site.settings import SiteSettings
from medsilo_lab.consortium.description import PRIVATE, SERVICE, Consortium
from medsilo_lab.jobs import CONTROLLER
from nvflare_reliability.revocation import LIST, read_list, signed_list

HERE = Path(__file__).parent
RUN, GUARD, LISTENER = "keep-running.sh", "site_guard.py", "relay_listener.py"
EARLIER = "earlier-certificates"  # folder in private-root/ with the earlier certificates of each party
# A relay's kit contains the address at which the relay listens. If a client connects to a relay, the relay's address is
# the only address in the client's kit.
CONNECTIONS = ("comm_config.json", "relay__resources.json")
# By default, NVFlare tries ten times to start a job with a disconnected hospital, and doubles the pause after each
# attempt. With the settings in WAITING, NVFlare tries twice a minute for a week. The seconds are integers, because a
# float overflows when NVFlare doubles it a thousand times, and the scheduler then starts no more jobs.
WAITING = {"min_schedule_interval": 10, "max_schedule_interval": 30, "max_schedule_count": 20_160}
OWN_COMPONENTS = {
    "forgotten_jobs": "nvflare_reliability.cleanup.ForgottenJobs",
    "bounded_streams": "nvflare_reliability.cleanup.BoundedStreams",
    "returning_sites": "nvflare_reliability.returning_sites.ReturningSites",
    "own_storage": "medsilo_server.flare.own_storage.OwnStorage",
    "known_hospitals": "medsilo_server.flare.admission.KnownHospitals",
    "kit_events": "medsilo.flare.kit_events.ServerEvents",
    "resumed_studies": "medsilo_server.flare.resuming.ResumedStudies",
}


def provision(consortium: Consortium, kits: Path, renew: Collection[str] = (), new_key: bool = False) -> list[str]:
    """Make the missing kits with the existing root certificate, and make new certificates for the parties in `renew`.
    Return the names of all parties with a new kit or a new certificate.

    An existing kit stays unchanged unless its party gets a new certificate. If `new_key` is true, the new certificates
    are for new keys; otherwise, parties keep their keys. A party with a new key also gets a folder startup-before/ with
    its earlier key. With the earlier key, the party checks the signatures of its existing files, and then signs these
    files with the new key.
    """
    root = kits / PRIVATE
    make_folder(root)
    project = consortium.project()
    names = [participant["name"] for participant in project["participants"]]
    if unknown := sorted(set(renew) - set(names)):
        raise MedsiloError(f"nobody in {consortium.name} is called {unknown[0]!r}; known: {', '.join(names)}")
    _check_kept_promises(root / "project.yml", project, renew)
    state = root / consortium.name / "state" / "cert.json"
    before = json.loads(state.read_text()) if renew and state.exists() else {}
    with _undone(state, before):
        _forget(state, renew)
        for name in before.keys() & {*renew}:
            _remember(root, name, before[name]["cert"])
        fresh = _build(project, root)
        try:
            _complete(consortium, fresh)
            renewed = [name for name in sorted(set(renew)) if name in before]
            if not new_key:
                _keep_keys(state, before, {name: fresh / name / "startup" for name in renewed})
            _seal([fresh / name / "startup" for name in names], state)
            new = [name for name in names if not (kits / name).exists()]
            hospitals = [hospital.name for hospital in consortium.hospitals if new_key and hospital.name in renewed]
            for name in hospitals:
                _set_aside(before[name], fresh / name / "startup", fresh / name / BEFORE)
            for name in new:
                (fresh / name).chmod(0o700)
                (fresh / name).rename(kits / name)
            for name in sorted(set(renew) - set(new)):
                for folder in ("startup", *([BEFORE] if name in hospitals else [])):
                    _replace(kits / name / folder, fresh / name / folder)
                if name not in hospitals:
                    shutil.rmtree(kits / name / BEFORE, ignore_errors=True)
                for file in (*CONNECTIONS, LISTENER):
                    _replace_file(kits / name / "local" / file, fresh / name / "local" / file)
        finally:
            shutil.rmtree(fresh)
    write_text(root / "project.yml", yaml.safe_dump(project, sort_keys=False))
    return [*new, *sorted(set(renew) - set(new))]


def revoke(kits: Path, names: Collection[str]) -> Path:
    """Write a certificate revocation list with all entries of the earlier list and all certificates that the given
    parties ever had.
    """
    root = kits / PRIVATE
    states = sorted(root.glob("*/state/cert.json"))
    if len(states) != 1:
        raise MedsiloError(f"{kits} has no {PRIVATE}/ with the root key that signs the list")
    issued = json.loads(states[0].read_text())
    own: list[x509.Certificate] = []
    known = {path.parent.name for path in root.glob(f"{EARLIER}/*/*.pem")} | issued.keys()
    for name in names:
        if name not in known:
            raise MedsiloError(f"no party with a certificate is called {name!r}")
        texts = [path.read_text() for path in sorted((root / EARLIER / name).glob("*.pem"))]
        if isinstance(issued.get(name), dict):
            texts.append(issued[name]["cert"])
        if (kits / name / "startup/server.crt").exists():
            raise MedsiloError(
                f"{name} is the server: hospitals don't check the revocation list when they connect to the server. If "
                "the server's key may have leaked, make new kits for everybody in another folder"
            )
        own += [x509.load_pem_x509_certificate(text.encode()) for text in texts]
    anchor = x509.load_pem_x509_certificate(issued["root_cert"].encode())
    key: Any = load_pem_private_key(issued["root_pri_key"].encode(), None)
    before = read_list((kits / LIST).read_bytes(), anchor) if (kits / LIST).exists() else None
    made = signed_list(before, own, anchor, lambda builder: builder.sign(key, SHA256()))
    write_bytes(kits / LIST, made.public_bytes(Encoding.PEM))
    return kits / LIST


def _remember(root: Path, name: str, certificate: str) -> None:
    """Store the certificate of a party before the party gets a new certificate, so that both certificates can be
    revoked later.
    """
    own = x509.load_pem_x509_certificate(certificate.encode())
    make_folder(root / EARLIER / name)
    write_text(root / EARLIER / name / f"{own.serial_number:x}.pem", certificate)


@contextlib.contextmanager
def _undone(state: Path, before: dict[str, Any]) -> Iterator[None]:
    """If the kits with new certificates cannot be made, restore the earlier certificates and keys in NVFlare's
    state.
    """
    try:
        yield
    except BaseException:
        if before:
            write_json(state, before)
        raise


def _keep_keys(state: Path, before: Mapping[str, Any], kits: Mapping[str, Path]) -> None:
    """Replace the keys of new certificates by the parties' earlier keys. `kits` maps the name of each party to its
    startup/ folder.
    """
    now = json.loads(state.read_text())
    root: Any = load_pem_private_key(now["root_pri_key"].encode(), None)
    for name, startup in kits.items():
        key = load_pem_private_key(before[name]["pri_key"].encode(), None).public_key()
        made = x509.load_pem_x509_certificate(now[name]["cert"].encode())
        builder = x509.CertificateBuilder(made.issuer, made.subject, key, made.serial_number)  # type: ignore[arg-type]
        builder = builder.not_valid_before(made.not_valid_before_utc).not_valid_after(made.not_valid_after_utc)
        for extension in made.extensions:
            value = extension.value
            if isinstance(value, x509.SubjectKeyIdentifier):
                value = x509.SubjectKeyIdentifier.from_public_key(key)  # type: ignore[arg-type]
            builder = builder.add_extension(value, extension.critical)
        certificate = builder.sign(root, SHA256()).public_bytes(Encoding.PEM)
        now[name] = {"cert": certificate.decode(), "pri_key": before[name]["pri_key"]}
        own = next(path for path in startup.glob("*.crt") if path.read_bytes() == made.public_bytes(Encoding.PEM))
        own.write_bytes(certificate)
        own.with_suffix(".key").write_text(before[name]["pri_key"])
    write_json(state, now)


def _set_aside(before: Mapping[str, str], startup: Path, folder: Path) -> None:
    """Write a hospital's earlier certificate and key into a folder. With the earlier key, the hospital checks the
    signatures of its existing files, and then signs these files with its new key.
    """
    make_folder(folder)
    files = {"client.crt": before["cert"], "client.key": before["pri_key"]}
    for name, content in files.items():
        write_text(folder / name, content)
    shutil.copyfile(startup / "rootCA.pem", folder / "rootCA.pem")


def _replace(old: Path, new: Path) -> None:
    """Replace a folder by a copy of another folder. The old folder is removed only after the new folder is complete. If
    the old folder is a mount point, its files are replaced one at a time.
    """
    arriving, leaving = (old.with_name(f".{old.name}.{word}") for word in ("new", "old"))
    for left in (arriving, leaving):
        shutil.rmtree(left, ignore_errors=True)
    try:
        shutil.copytree(new, arriving)
        try:
            if old.exists():
                old.rename(leaving)
            arriving.rename(old)
        except OSError:  # a mounted folder can't be renamed
            if not old.exists():
                leaving.rename(old)
            for file in arriving.iterdir():
                _replace_file(old / file.name, file)
            for file in old.iterdir():
                if not (arriving / file.name).exists():
                    file.unlink()
    finally:
        for left in (arriving, leaving):
            shutil.rmtree(left, ignore_errors=True)


def _replace_file(old: Path, new: Path) -> None:
    if not new.exists():
        old.unlink(missing_ok=True)
        return
    write_bytes(old, new.read_bytes())
    old.chmod(new.stat().st_mode)


def write_requests(consortium: Consortium, folder: Path) -> None:
    """Write the files with which parties make their own keys by NVFlare's commands 'cert' and 'package'.

    The lead keeps the file project_profile.yaml. Each party receives the folder that has the party's name.
    """
    if unsigned := [person.name for person in consortium.people if person.role == "project_admin"]:
        raise MedsiloError(
            f"NVFlare does not sign certificate requests of a project_admin; give {unsigned[0]} another role"
        )
    if consortium.relays:
        raise MedsiloError(
            "NVFlare's 'package' makes no kits for relays; provision without --requests, or take relays out"
        )
    server = consortium.server
    ports = {"fed_learn_port": server.port, "admin_port": server.port}
    connection = {"scheme": server.scheme, "connection_security": "mtls"}
    profile = {"name": consortium.name, **connection, "server": {"host": server.host, **ports}}
    write_text(folder / "project_profile.yaml", yaml.safe_dump(profile, sort_keys=False))
    for participant in consortium.participants():
        asked = {key: participant[key] for key in ("name", "type", "org", "role") if key in participant}
        definition = {"name": consortium.name, "participants": [asked]}
        write_text(folder / asked["name"] / f"{asked['name']}.yaml", yaml.safe_dump(definition, sort_keys=False))
    with tempfile.TemporaryDirectory() as unused:
        for name in provision(consortium, Path(unused) / "kits"):
            shutil.copytree(Path(unused) / "kits" / name / "local", folder / name / "local", dirs_exist_ok=True)


def _check_kept_promises(path: Path, project: dict[str, Any], renew: Collection[str]) -> None:
    """Raise MedsiloError if the changed description contradicts an issued certificate, or the kit of a party that gets
    no new certificate.
    """
    if not path.exists():
        return
    try:
        old = load_yaml(path.read_text(encoding="utf-8"))
        server, new_server = (kept["participants"][0] for kept in (old, project))
        was = old["name"], old["builders"], server | {"host_names": None}
        names = server.get("host_names")
        known = {before["name"]: before for before in old["participants"]}
    except (OSError, UnicodeDecodeError, YamlError, LookupError, TypeError) as error:
        message = f"{path.name} of the kits that are there is damaged; put it back from a copy"
        raise MedsiloError(message, private=str(path)) from error
    if was != (project["name"], project["builders"], new_server | {"host_names": None}):
        raise MedsiloError(
            "the existing kits have another name, root_valid_days or server than consortium.yaml; undo the change, "
            "or make new kits for everybody in another folder"
        )
    if names != new_server.get("host_names") and (name := new_server["name"]) not in renew:
        raise MedsiloError(
            f"the server's certificate lacks its new host names; give --renew {name}, and replace the server's startup/"
        )
    now = {participant["name"]: participant for participant in project["participants"]}
    for name, before in known.items():
        after = now.get(name, before)
        for key in ("type", "org", "role"):
            if before.get(key) != after.get(key):
                raise MedsiloError(
                    f"{name} has a certificate as {before.get(key)!r} and can't become {after.get(key)!r}; "
                    "give the party another name"
                )
        if name in now and name not in renew and _route(known, name) != _route(now, name):
            raise MedsiloError(
                f"the earlier kit of {name} connects to other addresses; give --renew {name}, then let its owner "
                f"replace startup/, and {' and '.join(CONNECTIONS)} in local/"
            )


def _route(participants: Mapping[str, dict[str, Any]], name: str) -> list[Any]:
    """Return the route from a party through relays to the server. The list contains three values for the party and for
    each relay: name, listening address, and the address to connect to.
    """
    route: list[Any] = []
    while here := participants.get(name):
        route += [name, here.get("listening_host"), here.get("connect_to")]
        name = here.get("connect_to", {}).get("name", "")
    return route


def _forget(path: Path, names: Collection[str]) -> None:
    """Remove the certificates of the given parties from NVFlare's state, so that NVFlare issues new certificates to the
    parties.
    """
    if names and path.exists():
        state = json.loads(path.read_text())
        write_json(path, {name: entry for name, entry in state.items() if name not in names})


def _build(project: dict[str, Any], root: Path) -> Path:
    """Make NVFlare build the kits of all participants. If the root certificate and the state are unchanged, the kits
    have the same bytes as before.
    """
    project = copy.deepcopy(project)  # NVFlare modifies this argument
    log, said = logging.Logger("provisioning"), io.StringIO()
    log.addHandler(errors := logging.StreamHandler(said))
    errors.setLevel(logging.ERROR)
    try:
        # hides the traceback of NVFlare, because the log contains the reason of the failure
        with contextlib.redirect_stderr(io.StringIO()):
            provisioner = Provisioner(str(root), prepare_builders(project))
            context = provisioner.provision(prepare_project(project), logger=log)
    except (ValueError, RuntimeError) as error:
        raise MedsiloError(f"NVFlare refused the consortium: {error}") from error
    if context.get(CtxKey.BUILD_ERROR):
        raise MedsiloError(f"NVFlare could not make the kits: {' '.join(said.getvalue().split())}")
    (Path(context.get_state_dir()) / "cert.json").chmod(0o600)
    return Path(context[CtxKey.CURRENT_PROD_DIR])


def _seal(folders: list[Path], state: Path) -> None:
    """Sign every file with the root key. NVFlare starts a kit only if its signed certificate, key and addresses are
    unchanged.
    """
    key = load_private_key(json.loads(state.read_text())["root_pri_key"])
    for folder in folders:
        sign_folders(str(folder), key, signature_file=ProvFileName.SIGNATURE_JSON)


def _complete(consortium: Consortium, fresh: Path) -> None:
    """Add medsilo's files to each kit, and add medsilo's classes to NVFlare's class allow-list. The kit of a hospital
    gets the hospital's policies. The kit of the server gets the path of a storage folder, limits for each sender, and
    permissions. With the permissions, each lead sees only the lead's own jobs.
    """
    for hospital in consortium.hospitals:
        shutil.copytree(hospital.policies, fresh / hospital.name / "local", dirs_exist_ok=True)
        SiteSettings.read(fresh / hospital.name / "local")
        guard(fresh / hospital.name)
        supervise(fresh / hospital.name, "hospital")
    for relay in consortium.relays:
        supervise(fresh / relay.name, "relay")
        _listen(fresh / relay.name / "local")
    supervise(fresh / consortium.server.host, "server", consortium.server.storage)
    local = fresh / consortium.server.host / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"].append(CONTROLLER)
    storage = consortium.server.storage
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")
    components = {component["id"]: component for component in resources["components"]}
    components["job_manager"]["args"]["uri_root"] = str(storage / "jobs")
    components["job_scheduler"]["args"] |= WAITING
    for own, path in OWN_COMPONENTS.items():
        resources["components"].append({"id": own, "path": path, "args": {}})
    write_json(local / "resources.json", resources)
    rights = json.loads((local / "authorization.json.default").read_text())
    # a lead may watch the studies that this lead has submitted
    rights["permissions"]["lead"]["app_command"] = "n:submitter"
    write_json(local / "authorization.json", rights)
    write_json(local / HOSPITALS, {"hospitals": sorted(hospital.name for hospital in consortium.hospitals)})


def _listen(local: Path) -> None:
    """Add the module relay_listener.py to a relay's kit, and name the module in the kit's settings. NVFlare then
    imports relay_listener.py before the relay accepts connections.
    """
    shutil.copyfile(HERE / LISTENER, local / LISTENER)
    path = local / CONNECTIONS[0]
    write_json(path, json.loads(path.read_text("utf-8")) | {"comm_driver_path": local.name})


def supervise(kit: Path, role: str, *writes: Path) -> None:
    """Write the restart script and the systemd unit into the kit of a server, relay or hospital.

    writes: Folders, besides the kit, into which the systemd unit may write.
    """
    shutil.copyfile(HERE / RUN, kit / RUN)
    (kit / RUN).chmod(0o700)
    unit = (HERE / SERVICE).read_text("utf-8")
    write_text(kit / SERVICE, unit.format(name=kit.name, role=role, writes=" ".join(map(str, writes))))


def guard(kit: Path) -> None:
    """Add a component to a hospital's kit. If medsilo is not installed, the component rejects every job."""
    (kit / "local/custom").mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(HERE / GUARD, kit / "local/custom" / GUARD)
