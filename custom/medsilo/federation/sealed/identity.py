"""Tell who a site is in a sealed study: the certificate and key of its kit."""

from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.sealing.signing import Certified, Signer, Unsigned


@dataclass(frozen=True)
class KitFiles:
    """The files of the certificate, the private key and the root certificate at a site."""

    certificate: str
    key: str
    root: str


def signer_of(files: KitFiles | None) -> Signer:
    """Return what a site signs with; nothing in a simulation, whose sites have no kit."""
    if files is None:
        return Unsigned()
    try:
        texts = [Path(path).read_bytes() for path in (files.certificate, files.key, files.root)]
    except OSError as error:
        raise MedsiloError(
            f"sealing: the kit's certificate, key or root cannot be read ({type(error).__name__}); this study seals "
            "what leaves, so it needs them",
            private=str(error),
        ) from error
    return Certified.read(*texts)
