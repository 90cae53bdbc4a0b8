"""Record a writer's file operations, and produce the states in which a power cut may leave the folder.

POSIX guarantees a file's content only after an fsync of the file, and a folder's names only after an fsync of the
folder.

Writes after the last fsync may survive fully, partly or not at all, in any order. Before recording each operation, the
program compares the whole folder with the recorded state, so that no operation is missed.
"""

import os
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path()
PAGE = 4096  # bytes that a disk writes atomically
RENAMING, REMOVING = ("replace", "rename"), ("unlink", "remove", "rmdir")


@dataclass
class Node:
    inode: int
    is_folder: bool = False
    contents: list[tuple[int, bytes]] = field(default_factory=lambda: [(0, b"")])
    # Indices of the fsync operations, of the file's content or of the folder's names.
    synced: list[int] = field(default_factory=list)

    def at(self, operation: int) -> int:
        return max(number for number, (since, _) in enumerate(self.contents) if since <= operation)


@dataclass(frozen=True)
class Naming:
    number: int
    names: dict[Path, Node | None]

    def is_durable(self, folders: dict[Path, Node], cut: int) -> bool:
        holders = {name.parent for name in self.names}
        return all(any(self.number < sync <= cut for sync in folders[holder].synced) for holder in holders)


@dataclass
class Fact:
    value: Any
    began: int
    ended: int | None = None


@dataclass(frozen=True)
class Cut:
    folder: Path
    number: int
    after: int
    known: list[Any]  # values whose storing had ended before the power cut
    begun: list[Any]  # values whose storing had begun before the power cut


class Disk:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.facts: list[Fact] = []
        self.count = 0
        self._lock = threading.RLock()
        root = Node(self.folder.stat().st_ino, True, synced=[0])
        self._folders: dict[Path, Node] = {HERE: root}
        self._names: dict[Path, Node] = {HERE: root}
        self._namings: list[Naming] = []
        self._look()
        self._initial = dict(self._names)
        for node in self._initial.values():
            node.synced.append(self.count)
        self._begin = self.count

    # ------------------------------------------------------------------ recording
    @contextmanager
    def recorded(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self._fsync)
            for name in (*RENAMING, *REMOVING, "link"):
                patch.setattr(os, name, self._watching(name, getattr(os, name)))
            yield
            self._look()

    @contextmanager
    def keeping(self, value: Any) -> Iterator[None]:
        """Mark the code block in which a writer stores a value; every power cut after the code block must preserve the
        value.
        """
        with self._lock:
            self._look()
            self.facts.append(fact := Fact(value, self.count))
        yield
        with self._lock:
            self._look()
            fact.ended = self.count

    def _within(self, path: Path) -> Path | None:
        whole = path.parent.resolve() / path.name
        return whole.relative_to(self.folder) if whole.is_relative_to(self.folder) else None

    def _fsync(self, descriptor: int) -> None:
        with self._lock:
            self._look()
            inode = os.fstat(descriptor).st_ino
            for node in {id(node): node for node in self._names.values() if node.inode == inode}.values():
                self.count += 1
                node.synced.append(self.count)

    def _watching(self, name: str, original: Any) -> Any:
        def operation(*paths: Any, **others: Any) -> None:
            with self._lock:
                self._look()
                original(*paths, **others)
                within = [self._within(Path(path)) for path in paths]
                if all(within) and not others.get("dir_fd"):
                    self._note(name, *within)

        return operation

    def _note(self, name: str, path: Path, to: Path = HERE) -> None:
        node = self._names[path]
        if name in RENAMING:
            assert not node.is_folder, f"{path}: a folder's new name is not modelled"
            self._rename({path: None, to: node})
        else:
            self._rename({path: None} if name in REMOVING else {to: node})

    def _rename(self, names: dict[Path, Node | None]) -> None:
        self.count += 1
        self._namings.append(Naming(self.count, names))
        for name, node in names.items():
            if node is None:
                self._names.pop(name)
            else:
                self._names[name] = node
                if node.is_folder:
                    self._folders[name] = node

    def _look(self) -> None:
        there = dict(self._walk(HERE))
        for name in self._names.keys() - there.keys() - {HERE}:
            raise AssertionError(f"an unrecorded operation removed {name}")
        for name, entry in there.items():
            node = self._names.get(name)
            if node is None:
                self._rename({name: Node(entry.inode(), entry.is_dir(), [(self.count + 1, b"")])})
                node = self._names[name]
            assert node.inode == entry.inode(), f"an unrecorded operation replaced {name}"
            if not node.is_folder and (content := Path(entry.path).read_bytes()) != node.contents[-1][1]:
                self.count += 1
                node.contents.append((self.count, content))

    def _walk(self, folder: Path) -> Iterator[tuple[Path, os.DirEntry]]:
        for entry in sorted(os.scandir(self.folder / folder), key=lambda entry: entry.name):
            name = folder / entry.name
            yield name, entry
            if entry.is_dir():
                yield from self._walk(name)

    # ------------------------------------------------------------------ cuts
    def cuts(self, place: Path, count: int, seed: int = 0) -> Iterator[Cut]:
        """Yield `count` power cuts that are spread over all operations; different cuts lose different writes."""
        draw, span = random.Random(seed), self.count - self._begin + 1
        for number in range(count):
            after = self._begin + (number * span // count if count < span else number % span)
            folder = place / f"cut-{number}"
            self._leave(folder, after, draw, (number + number // span) % 4)
            known = [fact.value for fact in self.facts if fact.ended is not None and fact.ended <= after]
            begun = [fact.value for fact in self.facts if fact.began <= after]
            yield Cut(folder, number, after, known, begun)
            shutil.rmtree(folder)

    def _leave(self, folder: Path, after: int, draw: random.Random, kind: int) -> None:
        pending = [one for one in self._namings if self._begin < one.number <= after]
        pending = [one for one in pending if not one.is_durable(self._folders, after)]
        lasts = draw.randint(0, len(pending))
        kept = {  # surviving operations: none, all, the first few, or a random selection
            0: lambda place: False,
            1: lambda place: True,
            2: lambda place: place < lasts,
            3: lambda place: draw.random() < 0.5,
        }[kind]
        lost = {one.number for place, one in enumerate(pending) if not kept(place)}
        names = dict(self._initial)
        for one in self._namings:
            if self._begin < one.number <= after and one.number not in lost:
                names.update(one.names)
        written: dict[int, Path] = {}
        folder.mkdir(parents=True)
        for name in sorted(name for name, node in names.items() if node and name != HERE):
            node, path = names[name], folder / name
            if not path.parent.is_dir():
                continue
            if node.is_folder:
                path.mkdir()
            elif id(node) in written:
                os.link(written[id(node)], path)
            else:
                path.write_bytes(_content(node, after, draw, kind))
                written[id(node)] = path


def _content(node: Node, after: int, draw: random.Random, kind: int) -> bytes:
    """Return content that a file may have after a power cut: at least the synchronised content."""
    newest = node.at(after)
    oldest = max((node.at(sync) for sync in node.synced if sync <= after), default=0)
    if kind < 2 or oldest == newest:
        return node.contents[newest if kind == 1 else oldest][1]
    number = draw.randint(oldest, newest - 1)
    return _torn(node.contents[number][1], node.contents[number + 1][1], draw)


def _torn(before: bytes, after: bytes, draw: random.Random) -> bytes:
    """Return partly written content: only some of the added bytes, or a mixture of old and new pages."""
    size = draw.randint(*sorted((len(before), len(after))))
    if draw.random() < 0.5:
        return (after if after.startswith(before) else before)[:size]
    old, new = (content.ljust(max(len(before), len(after)), b"\0") for content in (before, after))
    mixed = b"".join((new if draw.random() < 0.5 else old)[at : at + PAGE] for at in range(0, len(new), PAGE))
    return mixed[: draw.choice([len(before), len(after)])]
