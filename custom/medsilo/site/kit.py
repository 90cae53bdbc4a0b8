"""Tell who a site is, by the certificate and key of its kit."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medsilo.core import optional
from medsilo.core.errors import MedsiloError

if TYPE_CHECKING:  # many studies sign nothing
    from medsilo.site.signing import KeyPurpose, UseKey

HOSPITALS = "hospitals.json"  # in a server's local/: the hospitals' names


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

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return what the three files hold; raises MedsiloError."""
        try:
            certificate, key, root = (Path(path).read_bytes() for path in (self.certificate, self.key, self.root))
        except OSError as error:
            raise MedsiloError(
                f"the kit's certificate, key or root cannot be read ({type(error).__name__}); put them back, or ask "
                "the lead for the kit again",
                private=str(error),
            ) from error
        return certificate, key, root

    def key_for(self, use: "KeyPurpose") -> "UseKey":
        """Return the key that signs for this use alone, which the key of the kit certifies."""
        certificate, key, _ = self.read()
        return optional.UseKey.of(optional.read_pair(certificate, key)[1], use)
