"""Read a site's identity: the certificate and private key in the site's startup kit."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from medsilo.core.errors import TemporaryRefusal

if TYPE_CHECKING:  # imported only for type checking, because many studies need no signatures
    from medsilo.site.signing import KeyPurpose, UseKey

HOSPITALS = "hospitals.json"  # file of the hospitals' names, in the folder local/ of a server's kit
# copy of a kit's former folder startup/; this copy exists only if the kit was renewed with a new key
BEFORE = "startup-before"


@dataclass(frozen=True)
class KitFiles:
    certificate: str
    key: str
    root: str

    @property
    def kit(self) -> Path:
        return Path(self.certificate).parents[1]

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Read the certificate, the key and the root certificate, or raise MedsiloError if a file cannot be read."""
        try:
            certificate, key, root = (Path(path).read_bytes() for path in (self.certificate, self.key, self.root))
        except OSError as error:
            raise TemporaryRefusal(  # while startup/ is replaced, files are missing, but only for a short time
                f"the kit's certificate, key or root cannot be read ({type(error).__name__}); put them back, or ask "
                "the lead for the kit again",
                private=str(error),
            ) from error
        return certificate, key, root

    def key_for(self, use: "KeyPurpose") -> "UseKey":
        """Return the signing key for one purpose, which is derived from the kit's key and which the kit's key
        certifies.
        """
        certificate, key, _ = self.read()
        return _use_key(certificate, key, use)

    def earlier_key_for(self, use: "KeyPurpose") -> "UseKey | None":
        """Return the signing key for one purpose that is derived from the kit's earlier key. Return None if the kit has
        no earlier key.

        Raises MedsiloError unless the root authority issued the earlier certificate to this hospital. If the earlier
        certificate were not checked, anybody who may write to the kit could make medsilo trust a new key.
        """
        from medsilo.site.signing import check_succession

        folder = self.kit / BEFORE
        if not folder.is_dir():
            return None
        earlier = KitFiles(*(str(folder / Path(path).name) for path in (self.certificate, self.key, self.root)))
        certificate, key, _ = earlier.read()
        check_succession(self.read()[0], certificate, self.read()[2])
        return _use_key(certificate, key, use)


@lru_cache(maxsize=16)
def _use_key(certificate: bytes, key: bytes, use: "KeyPurpose") -> "UseKey":
    """Derive a signing key; the key is cached, because each round needs the key and parsing an RSA key is slow."""
    from medsilo.site.signing import UseKey, read_pair

    return UseKey.of(read_pair(certificate, key)[1], use)
