"""From the consortium's file to signed kits, over NVFlare's own provisioning."""

import contextlib
import copy
import io
import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from nvflare.lighter.constants import CtxKey, ProvFileName
from nvflare.lighter.prov_utils import prepare_builders
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner
from nvflare.lighter.utils import load_private_key, sign_folders

from medsilo.core.errors import MedsiloError, YamlError
from medsilo.core.files import make_folder, write_json, write_text
from medsilo.core.yaml_text import load_yaml
from medsilo.site.kit import HOSPITALS
from medsilo.site.policy import CONTROLLER
from medsilo.site.settings import SiteSettings
from medsilo_lab.consortium.description import PRIVATE, SERVICE, Consortium

HERE = Path(__file__).parent
RUN, GUARD = "keep-running.sh", "site_guard.py"  # files beside this one, as SERVICE
# In the kit of a relay: where it listens; of who is behind one: where it is, and that nobody else is connected to.
CONNECTIONS = ("comm_config.json", "relay__resources.json")
# A job whose hospital is away is tried twice a minute for a week. NVFlare's defaults try it ten times, after twice the
# pause each time. In whole seconds: doubled a thousand times, a fraction overflows, and then no job starts any more.
WAITING = {"min_schedule_interval": 10, "max_schedule_interval": 30, "max_schedule_count": 20_160}
OWN_COMPONENTS = {  # of the server's own process
    "forgotten_jobs": "nvflare_reliability.cleanup.ForgottenJobs",
    "bounded_streams": "nvflare_reliability.cleanup.BoundedStreams",
    "returning_sites": "nvflare_reliability.returning_sites.ReturningSites",
    "known_hospitals": "medsilo.flare.admission.KnownHospitals",
    "kit_events": "medsilo.flare.kit_events.ServerEvents",
    "resumed_studies": "medsilo.flare.resuming.ResumedStudies",
}


def provision(consortium: Consortium, kits: Path, renew: Collection[str] = ()) -> list[str]:
    """Make the kits that are not there yet, under the same root, and give `renew` new certificates; who got something.

    A kit that is there is left as it is.
    """
    root = kits / PRIVATE
    make_folder(root)
    project = consortium.project()
    names = [participant["name"] for participant in project["participants"]]
    if unknown := sorted(set(renew) - set(names)):
        raise MedsiloError(f"nobody in {consortium.name} is called {unknown[0]!r}; known: {', '.join(names)}")
    _check_kept_promises(root / "project.yml", project, renew)
    state = root / consortium.name / "state" / "cert.json"
    _forget(state, renew)
    fresh = _build(project, root)
    try:
        _complete(consortium, fresh)
        _seal([fresh / name / "startup" for name in names], state)
        new = [name for name in names if not (kits / name).exists()]
        for name in new:
            (fresh / name).chmod(0o700)
            (fresh / name).rename(kits / name)
        for name in sorted(set(renew) - set(new)):
            shutil.rmtree(kits / name / "startup")
            (fresh / name / "startup").rename(kits / name / "startup")
            for file in CONNECTIONS:
                (kits / name / "local" / file).unlink(missing_ok=True)
                if (fresh / name / "local" / file).exists():
                    (fresh / name / "local" / file).rename(kits / name / "local" / file)
    finally:
        shutil.rmtree(fresh)
    write_text(root / "project.yml", yaml.safe_dump(project, sort_keys=False))
    return [*new, *sorted(set(renew) - set(new))]


def write_requests(consortium: Consortium, folder: Path) -> None:
    """For the way in which every party makes its own key: what NVFlare's 'cert' and 'package' commands read.

    The lead keeps project_profile.yaml; each party gets the folder with its name.
    """
    if unsigned := [person.name for person in consortium.people if person.role == "project_admin"]:
        raise MedsiloError(f"NVFlare signs no request of a project_admin; give {unsigned[0]} another role")
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
    with tempfile.TemporaryDirectory() as unused:  # kits of a root that nobody gets, for what is in their local/
        for name in provision(consortium, Path(unused) / "kits"):
            shutil.copytree(Path(unused) / "kits" / name / "local", folder / name / "local", dirs_exist_ok=True)


def _check_kept_promises(path: Path, project: dict[str, Any], renew: Collection[str]) -> None:
    """Refuse to change what certificates and kits that are out say, unless these kits are renewed."""
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
            "existing kits have another name, root_valid_days or server; undo that change, or make new kits for "
            "everybody in another folder"
        )
    if names != new_server.get("host_names") and (name := new_server["name"]) not in renew:
        raise MedsiloError(f"the server's certificate has other names; give --renew {name}, and replace its startup/")
    now = {participant["name"]: participant for participant in project["participants"]}
    for name, before in known.items():
        after = now.get(name, before)
        for key in ("type", "org", "role"):
            if before.get(key) != after.get(key):
                raise MedsiloError(
                    f"{name} has a certificate as {before.get(key)!r} and can't become {after.get(key)!r}; "
                    "use another name"
                )
        if name in now and name not in renew and _route(known, name) != _route(now, name):
            raise MedsiloError(
                f"the earlier kit of {name} connects in another way; give --renew {name}, and its owner replaces "
                f"startup/, and {' and '.join(CONNECTIONS)} in local/"
            )


def _route(participants: Mapping[str, dict[str, Any]], name: str) -> list[Any]:
    """Return where a party listens and connects to, and all relays between it and the server."""
    route: list[Any] = []
    while here := participants.get(name):
        route += [name, here.get("listening_host"), here.get("connect_to")]
        name = here.get("connect_to", {}).get("name", "")
    return route


def _forget(path: Path, names: Collection[str]) -> None:
    """Drop certificates from NVFlare's state, so that it issues new ones."""
    if names and path.exists():
        state = json.loads(path.read_text())
        write_json(path, {name: entry for name, entry in state.items() if name not in names})


def _build(project: dict[str, Any], root: Path) -> Path:
    """Kits for all, as NVFlare builds them; those of the same root and state are the same byte for byte."""
    project = copy.deepcopy(project)  # NVFlare takes it apart
    log, said = logging.Logger("provisioning"), io.StringIO()
    log.addHandler(errors := logging.StreamHandler(said))
    errors.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its tracebacks; the reason is in the log
            provisioner = Provisioner(str(root), prepare_builders(project))
            context = provisioner.provision(prepare_project(project), logger=log)
    except (ValueError, RuntimeError) as error:
        raise MedsiloError(f"NVFlare refused the consortium: {error}") from error
    if context.get(CtxKey.BUILD_ERROR):
        raise MedsiloError(f"NVFlare could not make the kits: {' '.join(said.getvalue().split())}")
    (Path(context.get_state_dir()) / "cert.json").chmod(0o600)
    return Path(context[CtxKey.CURRENT_PROD_DIR])


def _seal(folders: list[Path], state: Path) -> None:
    """The root's signature over every file: NVFlare starts no kit whose certificate, key or addresses were changed."""
    key = load_private_key(json.loads(state.read_text())["root_pri_key"])
    for folder in folders:
        sign_folders(str(folder), key, signature_file=ProvFileName.SIGNATURE_JSON)


def _complete(consortium: Consortium, fresh: Path) -> None:
    """Each hospital's own policies; a server with a disk of its own for jobs, that forgets none, takes little of each
    sender and tells leads of their own; our classes."""
    for hospital in consortium.hospitals:
        shutil.copytree(hospital.policies, fresh / hospital.name / "local", dirs_exist_ok=True)
        SiteSettings.read(fresh / hospital.name / "local")
        guard(fresh / hospital.name)
        supervise(fresh / hospital.name, "hospital")
    for relay in consortium.relays:
        supervise(fresh / relay.name, "relay")
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
    rights["permissions"]["lead"]["app_command"] = "n:submitter"  # follow their own studies
    write_json(local / "authorization.json", rights)
    write_json(local / HOSPITALS, {"hospitals": sorted(hospital.name for hospital in consortium.hospitals)})


def supervise(kit: Path, role: str, *writes: Path) -> None:
    """Write loop and unit into the kit of a server, relay or hospital. writes: what it writes beside the kit."""
    shutil.copyfile(HERE / RUN, kit / RUN)
    (kit / RUN).chmod(0o700)
    unit = (HERE / SERVICE).read_text("utf-8")
    write_text(kit / SERVICE, unit.format(name=kit.name, role=role, writes=" ".join(map(str, writes))))


def guard(kit: Path) -> None:
    """Put into a hospital's kit what refuses jobs where medsilo is missing."""
    (kit / "local/custom").mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(HERE / GUARD, kit / "local/custom" / GUARD)
