"""Read a consortium's description and check its participants before any key is made."""

import re
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from medsilo.core.errors import MedsiloError
from medsilo.core.section import Section
from medsilo.core.yaml_text import read_yaml

EXAMPLE = "provisioning/consortium.yaml"
POLICIES = "site_configs"  # name of the folder with example policies, in a checkout and in the wheel medsilo-lab
SERVICE = "medsilo.service"
PRIVATE = "private-root"  # the lead's private folder, beside the folders of the kits
ROOT = "server"
MUTUAL = {"connection_security": "mtls"}


def _matching(pattern: str, hint: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} has odd characters; use {hint}")
        return text

    return AfterValidator(check)


# NVFlare uses the names of participants for files, folders and certificates. A name in a certificate has at most 63
# characters.
Name = Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", "letters, digits, '-' and '_', 63 at most")]
Organisation = Annotated[str, _matching(r"[A-Za-z0-9_]{1,63}", "letters, digits and '_', like st_anna")]
Host = Annotated[
    str,
    _matching(
        r"(?=.{1,63}$)([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?",
        "a host name like fl.example.org, 63 letters at most, without https:// and port",
    ),
]
Email = Annotated[
    str,
    _matching(r"(?=.{1,63}$)[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}", "an e-mail address like lead@example.org"),
]
Port = Annotated[int, Field(ge=1, le=65535)]


class Server(Section):
    """The server of the federation. Hospitals and people connect to the server, which itself opens no connections."""

    host: Host
    # further host names under which clients reach the server, such as names of a machine that may replace it
    other_names: list[Host] = Field(default_factory=list)
    port: Port = 8002
    organisation: Organisation
    scheme: Literal["tcp", "grpc", "http"] = "tcp"
    storage: Path = Path("/var/lib/medsilo")  # folder on the server's machine for NVFlare's jobs and their results

    @field_validator("storage")
    @classmethod
    def _absolute(cls, storage: Path) -> Path:
        if not storage.is_absolute():
            raise ValueError(f"{str(storage)!r} is not an absolute path; begin it with /")
        return storage


class Hospital(Section):
    name: Name
    organisation: Organisation
    contact: Email
    # A folder whose files are copied into the kit's folder local/. A relative path starts at the folder of
    # consortium.yaml.
    policies: Path


class Relay(Section):
    """A relay. Clients connect to the relay, and the relay connects to the server."""

    name: Name
    host: Host
    port: Port = 8002
    organisation: Organisation
    behind: list[Name] = Field(min_length=1)  # names of the hospitals and relays that connect to this relay


class Person(Section):
    name: Email
    organisation: Organisation
    role: Literal["project_admin", "org_admin", "lead", "member"]


class Consortium(Section):
    name: Name
    # lifetime of the root certificate; all other certificates of NVFlare last 360 days
    root_valid_days: int = Field(1825, ge=1, le=7300)
    server: Server
    hospitals: list[Hospital] = Field(min_length=1)
    people: list[Person] = Field(min_length=1)
    # the relays of the consortium; clients that no relay names connect directly to the server
    relays: list[Relay] = Field(default_factory=list)

    @model_validator(mode="after")
    def _each_name_once(self) -> "Consortium":
        seen = {PRIVATE}
        for name in [self.server.host, *self._sites(), *(person.name for person in self.people)]:
            if name.casefold() in seen:
                why = "is medsilo's own folder" if name.casefold() == PRIVATE else "is given twice"
                raise ValueError(f"the name {name!r} {why}; every hospital, relay and person needs a different name")
            seen.add(name.casefold())
        return self

    @model_validator(mode="after")
    def _relays_lead_to_the_server(self) -> "Consortium":
        places = {(self.server.host, self.server.port)}
        known, above = self._sites(), dict[str, str]()
        for relay in self.relays:
            if relay.name == ROOT:
                raise ValueError(f"NVFlare calls the server {ROOT!r}; give the relay another name")
            if (relay.host, relay.port) in places:
                raise ValueError(
                    f"two parties listen on port {relay.port} of {relay.host}; give relay {relay.name} another port"
                )
            places.add((relay.host, relay.port))
            for name in relay.behind:
                if name not in known:
                    raise ValueError(
                        f"relay {relay.name} lists {name!r}, which is not a hospital or relay of this file"
                    )
                if name in above:
                    raise ValueError(
                        f"{name} is behind relay {above[name]} and again behind {relay.name}; list it once only"
                    )
                above[name] = relay.name
        try:
            TopologicalSorter({name: [relay] for name, relay in above.items()}).prepare()
        except CycleError as error:
            first = next(relay.name for relay in self.relays if relay.name in error.args[1])
            raise ValueError(
                f"relay {first} is behind itself; connect one relay of the circle to the server"
            ) from error
        return self

    def participants(self) -> list[dict[str, Any]]:
        server = self.server
        ports = {"fed_learn_port": server.port, "admin_port": server.port}
        onward = {name: {"connect_to": {"name": relay.name}} for relay in self.relays for name in relay.behind}
        others = {"host_names": server.other_names} if server.other_names else {}
        directly = {"connect_to": {"name": server.host, "host": server.host, **MUTUAL}}
        return [
            {"name": server.host, "type": "server", "org": server.organisation, **ports, **others},
            *(
                {"name": relay.name, "type": "relay", "org": relay.organisation, "listening_host": self._listens(relay)}
                | onward.get(relay.name, directly)
                for relay in self.relays
            ),
            *(
                {"name": hospital.name, "type": "client", "org": hospital.organisation, "contact": hospital.contact}
                | onward.get(hospital.name, {})
                for hospital in self.hospitals
            ),
            *(
                {"name": person.name, "type": "admin", "org": person.organisation, "role": person.role}
                for person in self.people
            ),
        ]

    def _sites(self) -> list[str]:
        return [relay.name for relay in self.relays] + [hospital.name for hospital in self.hospitals]

    def _listens(self, relay: Relay) -> dict[str, Any]:
        return {"scheme": self.server.scheme, "default_host": relay.host, "port": relay.port, **MUTUAL}

    def project(self) -> dict[str, Any]:
        room = "nvflare.lighter.impl"
        builders = [
            {"path": f"{room}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {
                "path": f"{room}.static_file.StaticFileBuilder",
                "args": {"config_folder": "config", "scheme": self.server.scheme, "require_signed_jobs": True},
            },
            {"path": f"{room}.cert.CertBuilder", "args": {"root_valid_days": self.root_valid_days}},
            {"path": f"{room}.signature.SignatureBuilder"},
        ]
        return {"api_version": 3, "name": self.name, "participants": self.participants(), "builders": builders}


def read_consortium(path: Path) -> Consortium:
    """Read and check a consortium's description, and make its relative paths absolute. If a key is wrong, the error
    message names the key and the remedy.
    """
    values = read_yaml(path, path.name, "a consortium.yaml")
    needed = [key for key, field in Consortium.model_fields.items() if field.is_required()]
    if not isinstance(values, dict) or not values.keys() & set(needed[1:]):
        raise MedsiloError(
            f"{path.name} is not a consortium's description: {', '.join(needed)} are missing; see {EXAMPLE}"
        )
    consortium = Consortium.from_values(values, path.name)
    found = [hospital.model_copy(update={"policies": _policies(hospital, path)}) for hospital in consortium.hospitals]
    return consortium.model_copy(update={"hospitals": found})


def _policies(hospital: Hospital, file: Path) -> Path:
    """Return the absolute path of a hospital's policies, which are in a folder beside consortium.yaml or in an example
    folder of medsilo-lab.
    """
    name, folders = hospital.policies, [file.parent / hospital.policies]
    if name.parent.name == POLICIES:
        package = Path(__file__).resolve().parents[1]
        # an installed wheel and a checkout have the example policies in different folders
        folders += [place / POLICIES / name.name for place in (package, package.parents[1])]
    with suppress(OSError, StopIteration):
        return next(folder.resolve() for folder in folders if (folder / "medsilo.yaml").is_file())
    raise MedsiloError(
        f"{file.name}: policies of {hospital.name}: {name} has no medsilo.yaml; "
        f"give a path relative to {file.name}, or {POLICIES}/strict-hospital"
    )
