"""Warn 30, 7 and 1 days before a startup kit's certificate expires.

The party that runs the startup kit and the server both log the warning. The server reads a hospital's certificate from
the hospital's heartbeats.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID
from pydantic import Field

from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded, write_passing
from medsilo.core.section import Section
from medsilo.runs.events import Event

KEPT = "certificates.json"  # file in a startup kit that contains the expiry times and the past warnings
TOLD = "medsilo.certificate"  # the key under which a hospital's heartbeat contains the certificate
LARGEST, MOST = 64_000, 10_000  # limits on the bytes of a certificate and on the number of parties
# warnings are due this number of days before a certificate expires; 0 stands for a certificate that has expired
DAYS, ENDED = (30, 7, 1), 0
DAY = 86_400.0


class _Kept(Section):
    # expiry time of each party's certificate, in seconds since 1970
    ends: dict[str, float] = Field(default_factory=dict, max_length=MOST)
    # the number of days in the last warning about each party's certificate: a value of DAYS, or ENDED
    told: dict[str, int] = Field(default_factory=dict, max_length=MOST)


def own_certificate(kit: Path) -> str:
    """Return the texts of a startup kit's certificate and of its root certificate, or "" if a certificate can't be
    read.
    """
    for name in ("server.crt", "client.crt"):
        with suppress(OSError, ValueError):
            files = [kit / "startup" / name, kit / "startup/rootCA.pem"]
            return "".join(read_bounded(file, LARGEST).decode() for file in files)
    return ""


def end_of(text: str) -> float | None:
    """Return the time, in seconds since 1970, at which the first of several certificates expires. Return None if a
    certificate can't be read.
    """
    try:
        found = x509.load_pem_x509_certificates(text.encode())
        return min(one.not_valid_after_utc for one in found).timestamp()
    except ValueError:
        return None


class CertificateEnds:
    """Records when certificates expire: the party's own certificate, and, at the server, the certificates of all
    hospitals.
    """

    def __init__(self, kit: Path) -> None:
        self.kit, self.file = kit, kit / KEPT
        self.kept, self.renewed = _Kept(), list[Event]()
        with suppress(OSError, ValueError, MedsiloError):
            self.kept = _Kept.from_values(json.loads(read_bounded(self.file, 8 << 20)), KEPT)

    def look(self, now: float) -> Iterator[Event]:
        """Read the party's own certificate, and yield all warnings that are due for any recorded certificate."""
        if (end := end_of(own_certificate(self.kit))) is not None:
            self._note("", end)
        while self.renewed:
            yield self.renewed.pop(0)
        for name, end in sorted(self.kept.ends.items()):
            days = ENDED if end <= now else next((few for few in sorted(DAYS) if end - now <= few * DAY), None)
            if days is not None and days < self.kept.told.get(name, DAYS[0] + 1):
                self._keep(self.kept.ends, {**self.kept.told, name: days})
                yield Event("certificate", _words(days, end), name, needs_somebody=True)

    def heard(self, name: str, text: object) -> None:
        """If the server's root authority issued a certificate for this hospital, record when the certificate
        expires.
        """
        if not isinstance(text, str) or len(text) > 2 * LARGEST or len(self.kept.ends) >= MOST:
            return
        with suppress(OSError, ValueError, TypeError, InvalidSignature, IndexError):
            root = x509.load_pem_x509_certificate((self.kit / "startup/rootCA.pem").read_bytes())
            own = x509.load_pem_x509_certificates(text.encode())[0]
            own.verify_directly_issued_by(root)
            if [one.value for one in own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [name]:
                end = min(own.not_valid_after_utc, root.not_valid_after_utc).timestamp()
                # after a heartbeat with a newer certificate, a late heartbeat with the older certificate may still
                # arrive
                self._note(name, max(end, self.kept.ends.get(name, end)))

    def ended(self, names: Collection[str], now: float) -> list[str]:
        """Return the named hospitals whose certificates have expired; "" stands for the party of this process."""
        return [name for name in ("", *sorted(names)) if self.kept.ends.get(name, now + 1) <= now]

    def _note(self, name: str, end: float) -> None:
        if (before := self.kept.ends.get(name)) != end:
            if before is not None and end > before:
                self.renewed.append(Event("certificate", f"it was renewed, and ends on {_day(end)}", name))
            # A new certificate ends the warnings about the party's previous certificate.
            told = {one: days for one, days in self.kept.told.items() if one != name}
            self._keep({**self.kept.ends, name: end}, told)

    def _keep(self, ends: dict[str, float], reported: dict[str, int]) -> None:
        self.kept = _Kept(ends=ends, told=reported)
        write_passing(self.file, self.kept.model_dump())


def _day(end: float) -> str:
    return f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M} UTC"


def _words(days: int, end: float) -> str:
    day = _day(end)
    if days == ENDED:
        return f"the certificate ended on {day}: its studies wait; the lead renews its kit (medsilo kits make --renew)"
    left = "a day" if days == 1 else f"{days} days"
    return f"the certificate ends in less than {left}, on {day}; the lead renews its kit (medsilo kits make --renew)"
