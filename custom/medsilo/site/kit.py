"""Tell who a site is, by the certificate and key of its kit."""

import json
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import MedsiloError, reading
from medsilo.site.signing import Certified, Signer, Unsigned, Use, UseKey

CONNECTION, RELAY = "fed_client.json", "../local/relay__resources.json"  # to whom a kit connects


@dataclass(frozen=True)
class KitFiles:
    """The files of the certificate, the private key and the root certificate at a site."""

    certificate: str
    key: str
    root: str

    @property
    def kit(self) -> Path:
        """The kit's folder."""
        return Path(self.certificate).parents[1]

    def key_for(self, use: Use) -> UseKey:
        """Return the key that signs for this use alone, which the key of the kit certifies."""
        signer = signer_of(self)
        assert isinstance(signer, Certified)
        return UseKey.of(signer.key, use)


def signer_of(files: KitFiles | None) -> Signer:
    """Return what a site signs with; nothing in a simulation, whose sites have no kit."""
    if files is None:
        return Unsigned()
    try:
        certificate, key, root = (Path(path).read_bytes() for path in (files.certificate, files.key, files.root))
    except OSError as error:
        raise MedsiloError(
            f"sealing: the kit's certificate, key or root cannot be read ({type(error).__name__}); this study seals "
            "what leaves, so it needs them",
            private=str(error),
        ) from error
    return Certified.read(certificate, key, root, _others(Path(files.certificate).parent))


def _others(startup: Path) -> set[str]:
    """Return the names of the server and of the relays before it: NVFlare writes their certificates like hospitals'."""
    found: set[str] = set()
    with reading("what the kit says of its server and relay"):
        if (startup / CONNECTION).exists():
            told = json.loads((startup / CONNECTION).read_text("utf-8"))
            found |= {server["identity"] for server in told["servers"]}
        if (startup / RELAY).exists():
            found |= {*json.loads((startup / RELAY).read_text("utf-8"))["relay_config"]["fqcn"].split(".")}
    return found
