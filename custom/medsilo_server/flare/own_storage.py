"""End the start of a server whose storage folder belongs to another server.

This component runs in the server's parent process.

NVFlare runs each submitted job in the storage folder. Two servers with the same storage folder would run each other's
jobs.
"""

from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import make_folder, read_bounded, write_text
from medsilo.flare.leftovers import storage_of
from medsilo.flare.workspace import kit_folder
from medsilo.runs import events

# a file in the storage folder that contains the server's name, and the digest of the public key of the server's root
# authority
OWNER = "server.txt"
LARGEST = 64_000  # maximum bytes of a certificate or of the file that names the server


class OwnStorage(FLComponent):
    """Marks the storage folder with the name of this server. If another server has marked the folder, this server does
    not start.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        try:
            claim(kit_folder(fl_ctx))
        except MedsiloError as error:
            self.log_critical(fl_ctx, f"the server does not start: {error}")
            events.write(kit_folder(fl_ctx), events.Event("failed", str(error), needs_somebody=True))
            raise UnsafeComponentError(str(error)) from error  # only an error of this class ends the start of NVFlare


def claim(kit: Path) -> None:
    """Mark the storage folder of a server; raise MedsiloError if another server has marked the folder.

    The mark contains the server's name and root authority. A renewed or restored startup kit has the same name and root
    authority as before, so the server still owns the storage folder.
    """
    if (storage := storage_of(kit)) is None:
        return
    own, mark = _owner(kit), storage / OWNER
    if not mark.exists():
        make_folder(storage)
        write_text(mark, own + "\n")
        return
    with reading(f"{OWNER} in the server's storage"):
        told = read_bounded(mark, LARGEST).decode().strip()
    if told != own:
        raise MedsiloError(
            f"the jobs in its storage belong to another server, {told.split(' ')[0]!r}; choose another server.storage "
            "in consortium.yaml, and make the kits again",
            str(storage),
        )


def _owner(kit: Path) -> str:
    with reading("the certificate of the server's kit, or its root"):
        server, root = (
            x509.load_pem_x509_certificate(read_bounded(kit / "startup" / name, LARGEST))
            for name in ("server.crt", "rootCA.pem")
        )
    (name,) = server.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    key = root.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return f"{name.value!s} {sha256(key).hexdigest()}"
