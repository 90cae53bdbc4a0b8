"""Check a kit without NVFlare: its certificates, its key, and the connection to its server.

As a health probe, the command `python -m medsilo.check.kit KIT` exits with 0 if the kit's party is running. If the
kit's party is not running, the command prints the reason and exits with 1.
"""

import json
import os
import socket
import ssl
import stat
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medsilo.check.result import Finding
from medsilo.core.errors import MedsiloError

if TYPE_CHECKING:
    import psutil

SEAL = "signature.json"
SOON = timedelta(days=30)
PATIENCE = 5.0  # time limit, in seconds, for the server to answer
TRIES = 3  # number of TLS handshakes to try before the check fails
LOG = 1 << 20  # number of bytes that the check reads from the end of a log
PARTIES = {"fed_client": "hospital", "fed_server": "server", "fed_admin": "person", "fed_relay": "relay"}
RELAY = Path("local/relay__resources.json")  # a file that exists only in kits of hospitals that connect through a relay
NVFLARE = "nvflare.private.fed.app."  # prefix of the names of NVFlare's programs
# programs that run a job and can outlive the kit's main process
OF_A_JOB = (f"{NVFLARE}client.worker_process", f"{NVFLARE}server.runner_process")
AGAIN = "ask the consortium's lead for a new startup folder and replace yours"
CHECKS = {
    "certificates": "dates, root and name of the certificate; the key, and who may read the key's file; the signature "
    "of `startup/`",
    "network": "the server's name resolves, its port answers, and its certificate has the consortium's root",
}


@dataclass(frozen=True)
class Kit:
    folder: Path  # the folder startup/ in the kit
    party: str  # the kind of party to which the kit belongs: hospital, server, person or relay
    name: str
    host: str
    port: int
    certificate: str
    key: str
    root: str
    meets: str = "the server"  # how messages name the party that listens at `host` and `port`


def read_kit(kit: Path, wanted: str = "") -> Kit:
    """Read a kit from its folder, and raise a MedsiloError if the folder is not a kit.

    Args:
        wanted: the kind of party whose kit is required; empty for any party
    """
    if not kit.is_dir():
        raise MedsiloError("there is no such folder; give the folder of a kit", str(kit))
    startup = kit / "startup"
    path = next((path for path in (startup / f"{name}.json" for name in PARTIES) if path.is_file()), None)
    if path is None:
        names = ", ".join(f"{name}.json" for name in PARTIES)
        raise MedsiloError(f"the folder is not a kit: its startup/ contains none of {names}", str(kit))
    if wanted not in ("", PARTIES[path.stem]):
        raise MedsiloError(f"this kit belongs to a {PARTIES[path.stem]}; give the kit of a {wanted}", str(kit))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return _described(startup, PARTIES[path.stem], values)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise MedsiloError(f"the kit's {path.name} is damaged ({type(error).__name__}); {AGAIN}", str(path)) from error


def _described(startup: Path, party: str, values: dict[str, Any]) -> Kit:
    if party == "person":
        admin = values["admin"]
        own = (Path(admin[key]).name for key in ("client_cert", "client_key", "ca_cert"))
        return Kit(startup, party, admin["username"], admin["host"], int(admin["port"]), *own)
    if party == "relay":
        names = ("client.crt", "client.key", "rootCA.pem")  # NVFlare's default names
        return _connected(startup, party, values["identity"], names, values["connect_to"])
    server = values["servers"][0]
    host, _, port = server["service"]["target"].rpartition(":")
    files = server if party == "server" else values["client"]
    name = host if party == "server" else files["fqsn"].rpartition(".")[2]
    names = (files["ssl_cert"], files["ssl_private_key"], files["ssl_root_cert"])
    if (startup.parent / RELAY).is_file():
        relay = json.loads((startup.parent / RELAY).read_text(encoding="utf-8"))["relay_config"]
        return _connected(startup, party, name, names, relay)
    return Kit(startup, party, name, host, int(port), *names)


def _connected(startup: Path, party: str, name: str, names: tuple[str, str, str], to: dict[str, str]) -> Kit:
    """Return the kit of a relay, or of a party that is connected to a relay."""
    host, _, port = to["address"].rpartition(":")
    meets = "the server" if to["fqcn"] == "server" else f"the relay {to['identity']}"
    return Kit(startup, party, name, host, int(port), *names, meets)


def check_certificates(kit: Kit, now: datetime | None = None) -> Iterator[Finding]:
    """Check the dates of a kit's certificates, and check that certificate, key and root certificate belong together."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import NameOID

    where, now = "certificates", now or datetime.now(UTC)
    try:
        own, root = (
            x509.load_pem_x509_certificate((kit.folder / name).read_bytes()) for name in (kit.certificate, kit.root)
        )
        key = load_pem_private_key((kit.folder / kit.key).read_bytes(), None)
        is_own = own.public_key() == key.public_key()
        root.public_key()
    # cryptography raises UnsupportedAlgorithm for unknown elliptic curves
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        told = f"a certificate or the key in the kit can't be read ({type(error).__name__})"
        yield Finding(where, "stops", told, AGAIN, (str(error),))
        return
    for what, certificate in (("the kit's certificate", own), ("the consortium's root certificate", root)):
        yield _dates(what, certificate.not_valid_before_utc, certificate.not_valid_after_utc, now)
    try:
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        yield Finding(where, "stops", "the certificate is not of the kit's root", AGAIN)
    if not is_own:
        yield Finding(where, "stops", "the private key is not the certificate's", AGAIN)
    names = [attribute.value for attribute in own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [kit.name]:
        yield Finding(where, "stops", "the certificate is another party's than the kit", AGAIN)
    if (kit.folder / kit.key).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        told = "other accounts of this machine may read the private key"
        yield Finding(where, "note", told, "chmod 600 for the key, 700 for the kit")


def check_expelled(kit: Kit) -> Iterator[Finding]:
    """Report whether the server disabled this site or ended its registration, according to the kit's log."""
    log = kit.folder.parent / "log.txt"
    if kit.party == "server" or not log.is_file():
        return
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG))
        text = file.read(LOG).decode("utf-8", "replace")
    since = text[max(0, text.rfind("Successfully registered client")) :]
    if f"Client '{kit.name}' is disabled" in since:
        told = "the server refused this site when it connected last: the consortium has expelled it"
        yield Finding("network", "stops", told, "ask the consortium's lead; a project_admin can let it in again")
    elif "error:client_quit" in since:
        told = "the server has ended this site's registration: the consortium may have expelled it"
        yield Finding("network", "stops", told, "start the site again, and check again")


def check_seal(kit: Kit) -> Iterator[Finding]:
    """Check the root's signature of the kit's startup folder, because NVFlare rejects a kit with changed files."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    path, changed = kit.folder / SEAL, []
    try:
        root = x509.load_pem_x509_certificate((kit.folder / kit.root).read_bytes()).public_key()
    except (OSError, ValueError, UnsupportedAlgorithm):  # `check_certificates` reports this error
        return
    if not path.exists() or not isinstance(root, rsa.RSAPublicKey):
        return
    scheme = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.MAX_LENGTH)
    for name, signature in json.loads(path.read_text(encoding="utf-8")).items():
        file = kit.folder / name
        try:
            content = name.encode() if file.is_dir() else file.read_bytes()
            root.verify(b64decode(signature), content, scheme, hashes.SHA256())
        except (OSError, InvalidSignature):
            changed.append(name)
    if changed:
        told = f"{', '.join(sorted(changed))} in startup/ changed since the lead signed the kit"
        yield Finding("certificates", "stops", f"{told}, so NVFlare won't start it", AGAIN)
    else:
        yield Finding("certificates", "ok", "startup/ is as the lead signed it")


def _dates(subject: str, start: datetime, end: datetime, now: datetime) -> Finding:
    where = "certificates"
    if now < start:
        told = f"{subject} is valid from {start:%Y-%m-%d %H:%M} UTC on, and here it is {now:%Y-%m-%d %H:%M}"
        return Finding(where, "stops", told, "set this machine's clock right, or that of the lead's machine")
    if now > end:
        return Finding(where, "stops", f"{subject} ended on {end:%Y-%m-%d}", AGAIN)
    told = f"{subject} is valid to {end:%Y-%m-%d}, {(end - now).days} days"
    return Finding(where, "note", told, f"soon {AGAIN}") if end - now < SOON else Finding(where, "ok", told)


def check_network(kit: Kit) -> Finding:
    """Check that the server or relay answers with a TLS certificate of the consortium."""
    address = f"{kit.host}:{kit.port}"
    try:
        with socket.create_connection((kit.host, kit.port), PATIENCE) as plain:
            return _handshake(kit, plain, address)
    except socket.gaierror:
        told, remedy = f"{kit.host} does not resolve here", "ask your network's administrator, or the lead for the name"
    except OSError as error:
        told = f"{kit.meets} at {address} does not answer ({type(error).__name__})"
        remedy = "is it started? if so, let this machine open outbound connections to it (no proxy with tcp)"
    return Finding("network", "stops", told, remedy)


def _handshake(kit: Kit, plain: socket.socket, address: str) -> Finding:
    context = ssl.create_default_context(cafile=str(kit.folder / kit.root))
    # like NVFlare's clients, this check verifies the issuer of the certificate, and not the host's name
    context.check_hostname = False
    told = f"{kit.meets} at {address}"
    try:
        context.load_cert_chain(kit.folder / kit.certificate, kit.folder / kit.key)
        with context.wrap_socket(plain, server_hostname=kit.host):
            return Finding("network", "ok", f"{told} answers, with a certificate of the consortium's root")
    except ssl.SSLCertVerificationError as error:
        remedy = "is the kit of another consortium, or does a firewall between open TLS? it must not"
        return Finding("network", "stops", f"{told} shows a certificate of another root", remedy, (str(error),))
    except OSError as error:
        remedy = "is it NVFlare's port? does a firewall between open TLS? it must not"
        return Finding("network", "stops", f"{told} makes no TLS connection ({type(error).__name__})", remedy)


def trouble(kit: Kit) -> str | None:
    """Return the reason why a kit's party is not running, or None if the party is running.

    A server counts as running if the server completes a TLS handshake on this machine. Any party except a server counts
    as running if the main process of its kit has a network connection. The function ignores connections of other kits'
    processes, of job processes and of `medsilo status`.
    """
    if kit.party == "server":
        return _no_handshake(kit)
    import psutil

    home = kit.folder.parent.resolve()
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or ()
        if not any(word.startswith(NVFLARE) for word in line) or any(word in OF_A_JOB for word in line):
            continue
        # psutil can't read processes of other accounts, or processes that have ended
        with suppress(psutil.Error, OSError):
            if not any(Path(process.cwd(), word).resolve() == home for word in line):
                continue
            lines = process.net_connections("tcp")
            if any(line.status == "ESTABLISHED" and line.raddr.port == kit.port for line in lines):
                return None
    return f"no connection to {kit.meets} on port {kit.port}"


def processes_of(kit: Path) -> "Iterator[psutil.Process]":
    """Yield the other processes on this machine whose command lines name the kit's folder."""
    import psutil

    named = str(kit.resolve())
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and is_of_kit(process.info["cmdline"], named):
            yield process


def is_of_kit(words: list[str] | None, kit: str) -> bool:
    return any(word == kit or word.startswith(f"{kit}/") for word in words or ())


def _no_handshake(kit: Kit) -> str | None:
    """Return the reason why the server on this machine accepts no connections, or None if it accepts connections.

    The function tries a TLS handshake, because an open port does not prove that the server works. The function sends no
    certificate, because the server would register the sender of a certificate as a client.
    """
    context = ssl.create_default_context(cafile=str(kit.folder / kit.root))
    context.check_hostname = False
    # gRPC and HTTP need the protocols h2 and http/1.1, and NVFlare's TCP driver ignores the list of protocols
    context.set_alpn_protocols(["h2", "http/1.1"])
    for _ in range(TRIES):  # a busy server may close a new connection, so the check tries several handshakes
        try:
            with socket.create_connection(("127.0.0.1", kit.port), PATIENCE) as plain, context.wrap_socket(plain):
                return None
        except ConnectionRefusedError:
            return f"nothing listens on port {kit.port}"
        except (ssl.SSLEOFError, ConnectionResetError) as error:
            told = type(error).__name__
        except OSError as error:
            told = type(error).__name__
            break
    return f"what listens on port {kit.port} makes no handshake ({told})"


if __name__ == "__main__":
    try:
        told = trouble(read_kit(Path(sys.argv[1])))
    except (MedsiloError, IndexError) as error:
        told = str(error)
    sys.exit(told and f"medsilo: {told}")
