"""Tensors that a site has already are not sent again: a mark stands for each, both to the site and back.

A mark is the beginning of a tensor's bytes and the SHA-256 of its form and all its bytes. The site keeps the tensors of
the last order on its disk and says their marks; the server sends a mark alone where its own tensor has the same. What
training left as it was given goes back by its name. So the server keeps marks, and no tensors.

Nobody is believed. The site compares the hash of what it puts in a mark's place, and a site that says what is not so
gets marks for tensors that it lacks. It can only name what it was itself given in the same round.
"""

import hashlib
import json
import shutil
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import Lacks, MedsiloError, Refused
from medsilo.core.files import make_folder, write_text
from medsilo.core.spill import TYPES, bytes_of
from medsilo.core.tensors import Groups
from medsilo.core.text import plain
from medsilo.federation.seams import Channel, Missing, Outgoing, Receive, Site
from medsilo.learning.loop import Stop
from medsilo.runs.messages import FILES, MOST_MARKS, Marks, Message, Name, Parcel, check_values, held
from medsilo.runs.paths import RECEIVED

SMALLEST = 4096  # bytes of a tensor; a smaller one is sent as fast as its mark
BEGINNING = 8  # bytes of a tensor that stand in its mark
INDEX = "index.json"
ORDERS = ("round", "deliver", "try", "test")  # requests whose tensors are kept
Marked = Mapping[str, Mapping[str, str]]  # marks by group and tensor
KINDS = {name: kind for kind, name in TYPES.items()}


def mark_of(tensor: Tensor) -> str:
    """Return the mark of a tensor on the CPU."""
    content = bytes_of(tensor)
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(content)
    return content[:BEGINNING].hex() + found.hexdigest()


def may_be_named(tensor: Any) -> bool:
    """Return whether a mark may stand for a tensor."""
    return (
        isinstance(tensor, Tensor)
        and tensor.nbytes >= SMALLEST
        and tensor.dtype in TYPES
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
    )


# ---------------------------------------------------------------------------------------------------- at the server
class Naming(Message):
    """An answer's word about known tensors."""

    # By group: tensors that are byte for byte what the site was given in this round; they are not sent
    same: Annotated[
        dict[Name, Annotated[list[Name], Field(min_length=1, max_length=MOST_MARKS)]], Field(max_length=100)
    ] = {}
    # Of what the server has sent: what the site keeps a copy of, by group and tensor; None: it keeps none
    holds: Marks | None = None


class KnownTensors:
    """A channel that names what a site has already: it knows the marks of that, and those of its last order."""

    def __init__(self, inner: Channel, sealed: bool = False, lost: Callable[[str], None] = lambda site: None) -> None:
        """sealed: what sites send is, and never named; lost: hears of every site that did not answer, as it may not
        have what it was sent."""
        self.inner, self.sealed, self.lost = inner, sealed, lost
        self.held: dict[str, Marked] = {}  # by site, as it says; only of sites that keep copies
        self.told: dict[str, Marked] = {}
        self._marks: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # of tensors that several sites get

    def pause(self, seconds: float) -> None:
        self.inner.pause(seconds)

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        def going(site: str) -> Parcel:
            order = outgoing(site)
            groups, marks = self.shorten(site, order.groups)
            return replace(order, groups=groups, facts={**order.facts, "marks": marks}) if marks else order

        def coming(site: str, reply: Parcel) -> None:
            naming = Naming.read(self._named(reply))
            groups = self.whole(site, reply.groups, naming.same, outgoing(site).groups) if naming.same else reply.groups
            facts = {key: value for key, value in reply.facts.items() if key not in Naming.model_fields}
            receive(site, replace(reply, groups=groups, facts=facts))
            self.confirm(site, naming.holds)

        missing = self.inner.ask(sites, going, coming, timeout)
        self._note(missing)
        if lacking := sorted(site for site, gone in missing.items() if gone.lacks):
            again = self.inner.ask(lacking, going, coming, timeout)  # they are sent all tensors
            self._note(again)
            missing = {**{site: gone for site, gone in missing.items() if not gone.lacks}, **again}
        return missing

    def _named(self, reply: Parcel) -> dict[str, Any]:
        """Return what an answer says of known tensors, of a size that may be looked at; raises Refused."""
        told = {key: reply.facts[key] for key in Naming.model_fields if key in reply.facts}
        check_values(told, 3 * MOST_MARKS)
        return told

    def _note(self, missing: Mapping[str, Missing]) -> None:
        """Note what sites that did not answer still have; what an answer says that does not count is not read."""
        for site, gone in missing.items():
            self.lost(site)
            if gone.holds is not None and not gone.lacks:
                self.confirm(site, gone.holds)
            elif gone.kind == "refused" and site in self.held:
                self.held[site] = {}  # it is sent all tensors next time

    def confirm(self, site: str, holds: Marked | None) -> None:
        """Note what a site says that it has."""
        if holds is None:
            self.held.pop(site, None)
            return
        self.held[site] = {
            group: {name: sys.intern(mark) for name, mark in own.items()} for group, own in holds.items()
        }

    def shorten(self, site: str, groups: Groups) -> tuple[Groups, dict[str, dict[str, str]]]:
        """Return what has to be sent of an order to a site, and the marks of what it may keep or has."""
        held, left = self.held.get(site), MOST_MARKS
        told: dict[str, dict[str, str]] = {}
        if held is None:
            self.told.pop(site, None)
            return groups, told
        self._marks = {key: value for key, value in self._marks.items() if value[0]() is not None}
        sent: Groups = {}
        for group, tensors in groups.items():
            has = held.get(group, {})
            marks = {name: self._mark(tensor, has.get(name)) for name, tensor in tensors.items()}
            named = dict(list({name: mark for name, mark in marks.items() if mark}.items())[:left])
            left -= len(named)
            sent[group] = {name: tensor for name, tensor in tensors.items() if named.get(name, "") != has.get(name)}
            if named:
                told[group] = named
        self.told[site] = told
        return sent, told

    def _mark(self, tensor: Tensor, has: str | None) -> str:
        """Return a tensor's mark; none for one that is not worth it, or that begins in another way than what a site
        has: training has changed it."""
        if not may_be_named(tensor):
            return ""
        if has is not None and bytes_of(tensor)[:BEGINNING].hex() != has[: 2 * BEGINNING]:
            return ""
        known = self._marks.get(id(tensor))
        if known and known[0]() is tensor:
            return known[1]
        mark = sys.intern(mark_of(tensor))
        self._marks[id(tensor)] = weakref.ref(tensor), mark
        return mark

    def whole(self, site: str, groups: Groups, same: Mapping[str, list[str]], order: Groups) -> Groups:
        """Return an answer with what it names in its place; raises Refused for what was not named to it in this round.

        order: that round's tensors, which the server has anyway.
        """
        told = self.told.get(site, {})
        filled = {group: dict(tensors) for group, tensors in groups.items()}
        for group, names in same.items():
            for name in names:
                what = plain(f"{group}/{name}", 80)
                if self.sealed or group not in filled or name not in told.get(group, {}):
                    raise Refused(f"it names {what}, which it was not given by its mark in this round")
                if name in filled[group]:
                    raise Refused(f"it names {what} and sends it, or names it twice")
                filled[group][name] = order[group][name]
        return filled


# ---------------------------------------------------------------------------------------------------- at a site
class ReceivedTensors:
    """A site that keeps copies of the tensors of the last order on its disk, each in a file that its mark names."""

    def __init__(self, inner: Site, folder: Path, names: Callable[[], bool] = lambda: True) -> None:
        """folder: the site's, of the study; names: whether its answers may name what is as it was given."""
        self.inner, self.folder, self.names = inner, folder / RECEIVED, names
        self.holds: dict[str, dict[str, str]] = {}
        self.forms: dict[str, tuple[str, list[int]]] = {}  # by mark: type and shape
        self.given: Groups = {}  # of the order that is worked at: what may go back by its name
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            found = json.loads((self.folder / INDEX).read_text())
            self.forms = {mark: (str(kind), list(shape)) for mark, (kind, shape) in found["forms"].items()}
            self.holds = held(found["holds"]) or {}

    def answer(self, parcel: Parcel, stop: Stop) -> Parcel:
        reply = self.inner.answer(self.open(parcel), stop)
        if parcel.facts.get("task") == "test":
            self.forget()
        return self.close(reply, self.names())

    def open(self, order: Parcel) -> Parcel:
        """Return an order with all its tensors; raises Lacks where one that it names is not here any more."""
        facts = {key: value for key, value in order.facts.items() if key != "marks"}
        marks = held(order.facts.get("marks", {}))
        if marks is None:
            raise Refused("the server's order names tensors in a form that is not known")
        groups = {group: dict(tensors) for group, tensors in order.groups.items()}
        for group, named in marks.items():
            own = groups.setdefault(group, {})
            own |= {name: self._kept(mark) for name, mark in named.items() if name not in own}
        if groups and facts.get("task") in ORDERS:
            kept = {group: own for group, own in groups.items() if group != FILES}
            self._take(_worth_keeping(kept), marks)
        return Parcel(groups, facts, order.samples, order.metrics)

    def _take(self, order: Mapping[str, Mapping[str, tuple[str, Tensor]]], marks: Marked) -> None:
        """Keep an order, and note what of it is as the server told it."""
        self._keep(order)
        self.given = {
            group: {name: tensor for name, (mark, tensor) in own.items() if marks.get(group, {}).get(name) == mark}
            for group, own in order.items()
        }

    def close(self, answer: Parcel, names: bool) -> Parcel:
        """Return an answer as it leaves: it says what is held, and, if it may, names what is as it was given."""
        groups, same = self._shortened(answer.groups) if names else (answer.groups, {})
        self.given = {}
        told = {"same": same} if same else {}
        return Parcel(groups, {**answer.facts, "holds": self.holds, **told}, answer.samples, answer.metrics)

    def _shortened(self, groups: Groups) -> tuple[Groups, dict[str, list[str]]]:
        """Return what has to be sent of an answer, and the names of the rest."""
        alike = {
            group: [name for name in sorted(tensors) if _are_alike(tensors[name], self.given.get(group, {}).get(name))]
            for group, tensors in groups.items()
        }
        sent = {
            group: {name: tensor for name, tensor in tensors.items() if name not in alike[group]}
            for group, tensors in groups.items()
        }
        return sent, {group: names for group, names in alike.items() if names}

    def forget(self) -> None:
        """Remove all copies: the study is over here."""
        self.given = {}
        self._remove()

    def _kept(self, mark: str) -> Tensor:
        """Return a kept tensor, whose bytes are those of its mark."""
        kind, shape = self.forms.get(mark, ("", []))
        with suppress(OSError, ValueError, RuntimeError, TypeError, KeyError):
            content = bytearray((self.folder / mark).read_bytes())
            tensor = torch.frombuffer(content, dtype=KINDS[kind]).reshape(shape)
            if mark_of(tensor) == mark:
                return tensor
        raise Lacks("what this hospital received before is not on its disk any more; it has to be sent again")

    def _keep(self, order: Mapping[str, Mapping[str, tuple[str, Tensor]]]) -> None:
        """Keep an order in the place of the last one.

        A disk that does not take it costs the bytes that are sent again, and no more.
        """
        tensors = {mark: tensor for own in order.values() for mark, tensor in own.values()}
        holds = {group: {name: mark for name, (mark, _) in own.items()} for group, own in order.items() if own}
        forms = {mark: (TYPES[tensor.dtype], list(tensor.shape)) for mark, tensor in tensors.items()}
        if (holds, forms) == (self.holds, self.forms):
            return
        try:
            make_folder(self.folder)
            for mark in forms.keys() - self.forms.keys():
                (self.folder / mark).write_bytes(bytes_of(tensors[mark]))
            write_text(self.folder / INDEX, json.dumps({"holds": holds, "forms": forms}))
            for path in self.folder.iterdir():
                if path.name not in forms and path.name != INDEX:
                    path.unlink()
            self.holds, self.forms = holds, forms
        except (OSError, MedsiloError):
            self._remove()

    def _remove(self) -> None:
        self.holds, self.forms = {}, {}
        shutil.rmtree(self.folder, ignore_errors=True)


def _worth_keeping(groups: Groups) -> dict[str, dict[str, tuple[str, Tensor]]]:
    """Return those tensors of an order for which marks may stand, with their marks."""
    kept: dict[str, dict[str, tuple[str, Tensor]]] = {}
    left = MOST_MARKS
    for group, tensors in groups.items():
        names = [name for name, tensor in tensors.items() if may_be_named(tensor)][:left]
        kept[group] = {name: (mark_of(tensors[name]), tensors[name]) for name in names}
        left -= len(names)
    return kept


def _are_alike(one: Any, other: Tensor | None) -> bool:
    """Return whether two tensors are the same, byte for byte: zeros of both signs are not."""
    if other is None or not may_be_named(one) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
