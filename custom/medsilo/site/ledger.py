"""A hospital's privacy ledger: what every study cost its patients, entered before an answer leaves.

One file per data set. A line is an entry and its signature, and names the hash of the line before it; a second file,
the head, says how many lines there are at least. Lines are on the disk before what they count may leave, so that a
process that dies in between has counted too much and never too little.

Whose key signs is known beforehand: the kit's. A later key is let in by the hospital's engineer alone, and the one
before it signs that, too. Without a kit a key of its own lies beside the ledger, and shows nothing to whoever may write
there. What is noticed: a changed, removed, added or exchanged line, a file that was cut, another history that was
written without the key. What the key's owner does is not. Both files can be put back together to an earlier state:
the head that the kit keeps tells of it, and the heads that servers keep of what they were sent (`check_heads`).
"""

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import not_
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Literal

from pydantic import Field

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import FILE, sync_names
from medsilo.core.section import Section
from medsilo.privacy.accounting import counted, epsilon_of, together
from medsilo.privacy.mechanisms import Charge, Mechanism
from medsilo.site.kit import KitFiles
from medsilo.site.party import FILE_NAME
from medsilo.site.query_budget import LockedFolder, QueryBudget
from medsilo.site.settings import PrivacyRequirements
from medsilo.site.signed import S, Signature, line_of, opened, read_signed, signed, write_signed
from medsilo.site.signing import PrivateKey, UseKey, own_key, public_text

FOLDER_NAME, OWN_KEY, LOCK = "ledger", "key.pem", "ledger.lock"  # the folder is beside a hospital's book
OF = "this hospital's privacy ledger"
WAIT = 120.0  # seconds that another process may hold the lock
START = "0" * 64  # what stands for the line before the first
KEPT = "ledger-{}.head.json"  # in the kit: the head once more, by data set
ACCEPTED = "the engineer looked at it: this key signs from here on"
MOST_CHARGES = 10_000  # of an entry
SLACK = 1e-9  # of ε, for sums in another order
WHOLE = "the whole study"
ABOUT = 0.01  # of ε, where the account of a study is only estimated
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=200)]
Kind = Literal["opened", "planned", "charged"]


class Spending(Section):
    """The study that asks, as an entry names it."""

    study: Text
    plan: Text  # its hash
    method: Text
    lead: Text = ""  # who submitted it, as far as it is known


class LedgerEntry(Section):
    """One line of the ledger, which is signed."""

    number: int = Field(ge=0)
    previous: Hash
    time: int
    kind: Kind
    data: Text
    spending: Spending | None = None  # None where the ledger was opened, or goes on with another key
    what: Text = ""
    attempt: Text = ""  # of an answer: a stored one that is sent again is not charged again
    charges: tuple[Charge, ...] = Field((), max_length=MOST_CHARGES)
    delta: float | None = None  # at which the hospital counts
    epsilon: float | None = None  # over all that was charged, this entry included; None: no bound holds
    handed: str = Field("", exclude_if=not_)  # the public key that the one which signs this line lets in


class _Head(Section):
    """The number of lines of a ledger, and which these are."""

    began: Hash  # of the first line
    lines: int = Field(ge=0)
    hash: Hash  # of the last line
    time: int


@dataclass(frozen=True)
class LedgerStanding:
    """The content of a ledger."""

    entries: tuple[LedgerEntry, ...]
    head: str  # hash of the last line
    torn: bool  # whether a process died while it wrote a line, which counts for nothing: its answer did not leave
    keys: tuple[str, ...] = ("",)  # what signs after so many lines
    hashes: tuple[str, ...] = (START,)  # of the last of so many lines

    @cached_property
    def charged(self) -> Counter[Mechanism]:
        """Return what was charged, over all studies."""
        return counted(charge for entry in self.entries if entry.kind == "charged" for charge in entry.charges)

    def of(self, study: str) -> Counter[Mechanism]:
        """Return what was charged to one study."""
        return counted(charge for entry in self._of(study, "charged") for charge in entry.charges)

    def studies(self) -> list[str]:
        """Return the studies that were let in or charged, in the order in which they came."""
        return list(dict.fromkeys(_study(entry) for entry in self.entries if entry.spending))

    def most_of(self, study: str) -> Counter[Mechanism]:
        """Return what a study was charged, or may yet be charged by what it planned when it was last let in."""
        planned = self._of(study, "planned")
        return self.of(study) | (counted(planned[-1].charges) if planned else Counter())

    def has(self, study: str, attempt: str) -> bool:
        """Return whether an answer was charged."""
        return any(entry.attempt == attempt for entry in self._of(study, "charged"))

    def _of(self, study: str, kind: Kind) -> list[LedgerEntry]:
        return [entry for entry in self.entries if entry.kind == kind and _study(entry) == study]

    def epsilon(self, delta: float) -> float:
        """Return what all that was charged costs at this δ."""
        return epsilon_of(self.charged, delta)


class Ledger:
    """A hospital's ledger of one data set."""

    def __init__(self, book: Path, data: str, key: PrivateKey | UseKey | None = None, kit: Path | None = None) -> None:
        """book: the folder of what the hospital remembers; key: its kit's, or None for one that is made here; kit: the
        folder that keeps the head once more."""
        self.folder, self.data, self._given = book / FOLDER_NAME, data, key
        self.file, self.head = self.folder / f"{data}.jsonl", self.folder / f"{data}.head.json"
        self._heads = [self.head, *([kit / KEPT.format(data)] if kit else [])]
        self._folder = LockedFolder(self.folder, LOCK, WAIT, "this hospital's privacy ledger", "nothing leaves")
        self._read: dict[bytes, tuple[LedgerEntry, str]] = {}  # what lines say that were checked, and who signed it

    @property
    def exists(self) -> bool:
        """Return whether anything was ever entered."""
        return self.file.exists() or any(head.exists() for head in self._heads)

    # ------------------------------------------------------------------ writing
    def plan(self, study: "CountedStudy", planned: Sequence[Charge]) -> None:
        """Let a study in that will be charged so much, or raise Refused: studies that run keep what they planned."""
        with self._opened() as standing:
            study.check(standing, standing.of(study.name) | counted(planned))
            self._append(standing, "planned", study, WHOLE, "", together(planned, WHOLE))

    def expect(self, study: "CountedStudy", planned: Sequence[Charge]) -> None:
        """Raise Refused where there is no room for a study of about this cost; one that was let in has its own plan."""
        with self._opened() as standing:
            study.check(standing, standing.most_of(study.name) or counted(planned), ABOUT)

    def afford(self, study: "CountedStudy", charges: Sequence[Charge]) -> None:
        """Raise Refused unless these charges fit, before work is done for them; nothing is written."""
        with self._opened() as standing:
            study.check(standing, standing.of(study.name) + counted(charges))

    def charge(self, study: "CountedStudy", what: str, attempt: str, charges: Sequence[Charge]) -> None:
        """Enter what is about to leave, and return when it is on the disk; raises Refused when nothing is left.

        attempt: names the answer; one that was entered already is not entered again.
        """
        with self._opened() as standing:
            if standing.has(study.name, attempt):
                return
            study.check(standing, standing.of(study.name) + counted(charges))
            self._append(standing, "charged", study, what, attempt, charges)

    def accept(self, old: UseKey | None = None) -> bool:
        """Go on with this key from what is there, whatever was there before: the hospital's engineer looked at it.

        old: the key of an earlier kit. Returns whether the key before this one signed that, too.
        """
        with self._folder.alone():
            standing = self._lines_read()
            before = standing.entries and standing.keys[-1]
            own = self.folder / OWN_KEY
            keys = [self._key, *([old] if old else []), *([own_key(own, OF)] if own.exists() else [])]
            handing = next((key for key in keys if public_text(key) == before), None)
            if handing:
                Ledger(self.folder.parent, self.data, handing)._append(standing, "opened", handed=self._public)
            self._append(self._lines_read(), "opened", what=ACCEPTED)
            return bool(handing) or not before

    @contextmanager
    def _opened(self) -> Iterator[LedgerStanding]:
        """Give what the ledger says, after opening it, and let nobody else in as long as the block runs."""
        with self._folder.alone():
            if not self.exists:
                self._write_head(0, START)
            standing = self.read()
            if not standing.entries:
                self._append(standing, "opened", attempt=token_hex(16))  # no two ledgers begin alike
                standing = self.read()
            elif standing.keys[-1] != self._public:  # whose it is could not be told while no key was there
                raise MedsiloError(NOT_OURS)
            yield standing

    def _append(
        self,
        standing: LedgerStanding,
        kind: Kind,
        study: "CountedStudy | None" = None,
        what: str = "",
        attempt: str = "",
        charges: Sequence[Charge] = (),
        handed: str = "",
    ) -> None:
        delta = study.demands.delta if study and study.demands else None
        cost = None
        if delta is not None:
            cost = epsilon_of(standing.charged + (counted(charges) if kind == "charged" else Counter()), delta)
        entry = LedgerEntry(
            number=len(standing.entries),
            previous=standing.head,
            time=int(time.time()),
            kind=kind,
            data=self.data,
            spending=study.spending if study else None,
            what=what,
            attempt=attempt,
            charges=tuple(charges),
            delta=delta,
            epsilon=cost if cost is not None and math.isfinite(cost) else None,
            handed=handed,
        )
        line = line_of(signed(entry, self._key))
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE)
        with os.fdopen(descriptor, "rb+") as file:
            if standing.torn:
                file.truncate(sum(len(whole) + 1 for whole in _lines(self.file)[0]))
            file.write(line + b"\n")
            file.flush()
            os.fsync(descriptor)
        sync_names(self.folder)
        self._write_head(entry.number + 1, _hash(line))

    def _write_head(self, lines: int, last: str) -> None:
        first = next(iter(_lines(self.file)[0]), b"")
        head = _Head(began=_hash(first), lines=lines, hash=last, time=int(time.time()))
        for file in self._heads:
            write_signed(file, head, self._key)

    # ------------------------------------------------------------------ reading
    def standing(self) -> LedgerStanding:
        """Return what the ledger says, while nobody writes to it; raises MedsiloError where it was changed."""
        if not self.exists:
            return LedgerStanding((), START, False)
        with self._folder.alone():
            return self.read()

    def read(self) -> LedgerStanding:
        """Return what the files say, each line checked; raises MedsiloError, also where there are fewer than once, or
        where another key than this hospital's signs."""
        standing = self._lines_read()
        if standing.entries and self._trusted not in ("", standing.keys[-1]):
            raise MedsiloError(NOT_OURS)
        for file in self._heads:
            if file == self.head or file.exists():
                self._check_head(file, standing)
        return standing

    def _lines_read(self) -> LedgerStanding:
        lines, torn = _lines(self.file)
        entries: list[LedgerEntry] = []
        keys, hashes = [""], [START]
        for number, line in enumerate(lines):
            if line not in self._read:
                self._read[line] = _opened(line, LedgerEntry, f"line {number + 1}")
            entry, key = self._read[line]
            if entry.number != number or entry.previous != hashes[-1] or entry.data != self.data:
                raise MedsiloError(_changed(f"line {number + 1} does not follow the one before it"))
            # A later key: who goes before it let it in, or an engineer with the kit
            if entries and key not in (keys[-1], entries[-1].handed) and not self._given:
                raise MedsiloError(_changed(f"line {number + 1} is of a key that the one before it did not let in"))
            entries.append(entry)
            hashes.append(_hash(line))
            keys.append(key)
        return LedgerStanding(tuple(entries), hashes[-1], torn, tuple(keys), tuple(hashes))

    def _check_head(self, file: Path, standing: LedgerStanding) -> None:
        where = "its head" if file == self.head else "the head that the kit keeps"
        try:
            head, key = read_signed(file, _Head)
        except MedsiloError as error:
            told = f"{where} is not there, or not as it was signed"
            raise MedsiloError(_changed(told), private=str(error)) from error
        number, there = head.lines, len(standing.entries)
        if there < number:
            raise MedsiloError(_changed(f"{number} lines were written, and {there} are there"))
        if standing.hashes[number] != head.hash:
            raise MedsiloError(_changed(f"line {number} is not the one that was written"))
        if key != (standing.keys[number] or self._trusted or key):
            raise MedsiloError(_changed(f"{where} is signed by another key than its lines"))

    def signed_head(self) -> dict[str, Any]:
        """Return the signed head as it leaves, for a server to keep: hashes, the number of lines, and when."""
        with self._folder.alone():
            said = json.loads(self.head.read_text("utf-8"))
        return {**said["content"], "signature": said["signature"]}

    def check_heads(self, heads: Sequence[Mapping[str, Any]]) -> None:
        """Raise Refused where the ledger does not go on from a head that it once told a server.

        What no key of this ledger signed is the server's own invention, and one of another ledger is not looked at.
        After the engineer accepted what is there, earlier heads count no more.
        """
        standing = self.standing()
        accepted = max((entry.time for entry in standing.entries if entry.what == ACCEPTED), default=-1)
        for head in heads:
            said = {name: head[name] for name in _Head.model_fields}
            if len(standing.hashes) < 2 or said["began"] != standing.hashes[1] or said["time"] <= accepted:
                continue
            if not any(_signed_by(key, said, head["signature"]) for key in set(standing.keys[1:])):
                continue
            number = said["lines"]
            if number > len(standing.entries) or standing.hashes[number] != said["hash"]:
                told = f"a server knows {number} lines, and here are {len(standing.entries)} others"
                raise Refused(_changed(told))

    # ------------------------------------------------------------------ keys and locks
    @cached_property
    def _key(self) -> PrivateKey | UseKey:
        if self._given is not None:
            return self._given
        return own_key(self.folder / OWN_KEY, OF)

    @cached_property
    def _public(self) -> str:
        return public_text(self._key)

    @property
    def _trusted(self) -> str:
        """Return the public key that has to sign: the kit's, or that beside it; nothing where nobody here knows it."""
        return self._public if self._given or (self.folder / OWN_KEY).exists() else ""


def _opened(text: bytes, kind: type[S], what: str) -> tuple[S, str]:
    try:
        return opened(text, kind, what)
    except MedsiloError as error:
        raise MedsiloError(_changed(str(error)), error.private) from error


def _signed_by(key: str, head: Mapping[str, Any], signature: str) -> bool:
    with suppress(MedsiloError):
        opened(line_of(Signature(content=dict(head), key=key, signature=signature)), _Head, "the head")
        return True
    return False


@dataclass(frozen=True)
class CountedStudy:
    """A study that a ledger counts, with what its hospital demands."""

    spending: Spending
    demands: PrivacyRequirements | None = None  # None: it is counted, and never refused
    runs: Callable[[str], bool] = lambda study: False  # whether another study runs, which keeps what it planned

    @property
    def name(self) -> str:
        """Return the study's name."""
        return self.spending.study

    def check(self, standing: LedgerStanding, asked: Mapping[Mechanism, int], over: float = SLACK) -> None:
        """Raise Refused where being charged this in all is more than the hospital allows, and `over`."""
        if self.demands is None:
            return
        demands, where = self.demands, f"in its {FILE_NAME}"
        others: Counter[Mechanism] = Counter()
        for other in standing.studies():
            if other != self.name:
                others += standing.most_of(other) if self.runs(other) else standing.of(other)
        total = epsilon_of(others + Counter(asked), demands.delta)
        if total > demands.epsilon + over:
            alone, spent = epsilon_of(asked, demands.delta), epsilon_of(others, demands.delta)
            raise Refused(
                f"the study costs {_as_epsilon(alone)} at δ = {demands.delta:g}, with earlier studies of these data "
                f"{_as_epsilon(total)}; this hospital allows {demands.epsilon:g} (privacy.epsilon {where}), "
                f"{_as_epsilon(spent)} spent or reserved. Ask for fewer rounds or more noise"
            )


def _as_epsilon(epsilon: float) -> str:
    return f"ε = {epsilon:.3g}" if math.isfinite(epsilon) else "more ε than can be counted"


def _study(entry: LedgerEntry) -> str:
    return entry.spending.study if entry.spending else ""


def _lines(file: Path) -> tuple[list[bytes], bool]:
    """Return whole lines, and whether a part of one is behind them.

    A power cut may leave the end of a line on the disk without its beginning, of which the disk then gives zeros.
    """
    try:
        content = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise MedsiloError(_changed("it cannot be read"), private=f"{type(error).__name__}") from error
    *lines, rest = content.split(b"\n")
    if lines and not rest and b"\0" in lines[-1]:
        rest = lines.pop()
    return lines, bool(rest)


def _changed(how: str) -> str:
    return (
        f"this hospital's privacy ledger was changed or is damaged: {how}; nothing leaves until it is put back from a "
        "copy, or its engineer looks at it and says so (medsilo ledger show, accept)"
    )


# Also where a hospital had a ledger before it had a kit
NOT_OURS = _changed("it is signed by another key than this hospital's own, which is the kit's where there is one")


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def ledgers(book: Path, kit: Path | None = None) -> list[str]:
    """Return the data sets of which a hospital has a ledger, or of which its kit knows that there was one."""
    before, after = KEPT.split("{}")
    known = kit.glob(KEPT.format("*")) if kit else ()
    found = {path.name.removeprefix(before).removesuffix(after) for path in known}
    return sorted({path.stem for path in (book / FOLDER_NAME).glob("*.jsonl")} | found)


def ledger_of(book: QueryBudget, data: str, kit: KitFiles | None) -> Ledger:
    """Return a hospital's ledger of one data set, signed by a key of its kit where there is one."""
    return Ledger(book.folder, data, kit.key_for("ledger"), kit.kit) if kit else Ledger(book.folder, data)
