"""Read and write a safe subset of YAML: strings, numbers, truth values, lists and mappings."""

import os
import re
from pathlib import Path
from typing import Any

import yaml

from medsilo.core.errors import MedsiloError, YamlError
from medsilo.core.files import read_bounded

# PyYAML reads 1e-4 as a string because 1e-4 has no decimal point, although YAML 1.2 reads 1e-4 as a number.
NUMBER = ("tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789"))
LARGEST_YAML = 262_144  # bytes
MOST_NODES = 20_000  # limit on the keys, values, lists and mappings in a YAML text
DEEPEST = 32  # limit on the levels of nested lists and mappings
LONGEST_NUMBER = 40  # limit on the digits of a number
ODD = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters and surrogates


class _Loader(yaml.SafeLoader):
    """Loads YAML text without dates, aliases and explicit types.

    Dates are read as strings. Aliases (`&a`, `*a`, `<<`) are rejected, because a short text with aliases can expand to
    an unlimited length. Explicit types (`!!int`) and duplicate keys raise an error.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":merge", ":value"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        event: Any = self.peek_event()
        if problem := self._problem(event):
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _problem(self, event: Any) -> str:
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            return "names for parts of it (& and *) are not read"
        if getattr(event, "tag", None):
            return "types of its own (!) are not read"
        if self.nodes > MOST_NODES:
            return f"it has more than {MOST_NODES} keys and values"
        return f"it is more than {DEEPEST} levels deep" if self.depth > DEEPEST else ""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if ODD.search(value):
            raise yaml.constructor.ConstructorError(None, None, "a text has control characters", node.start_mark)
        if node.tag.endswith((":int", ":float")) and len(value) > LONGEST_NUMBER:
            problem = f"a number has more than {LONGEST_NUMBER} digits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for place, _ in node.value:
            key: Any = self.construct_object(place, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", place.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes YAML. A string that looks like a number is quoted."""


_Loader.add_implicit_resolver(*NUMBER)
_Dumper.add_implicit_resolver(*NUMBER)


def load_yaml(text: str) -> Any:
    """Return the values in a YAML text. Raises YamlError if the text is invalid."""
    if len(text.encode("utf-8", "replace")) > LARGEST_YAML:
        raise YamlError(f"it has more than {LARGEST_YAML} bytes")
    try:
        return yaml.load(text, _Loader)  # noqa: S506, TID251 - this loader makes no objects
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise YamlError(" ".join((problem or "syntax").split()), mark.line + 1 if mark else None) from error
    except (ValueError, OverflowError) as error:
        raise YamlError("a value that looks like a number cannot be read as one") from error


def read_yaml(path: Path, name: str, wanted: str) -> Any:
    """Return the values in a YAML file. Raises MedsiloError if the file is unreadable or invalid.

    Args:
        name: The file's name in errors.
        wanted: A description of the file that the user should give.
    """
    try:
        return load_yaml(read_bounded(path, LARGEST_YAML).decode())
    except YamlError as error:
        raise MedsiloError(f"{name} cannot be read: {error}; correct it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise MedsiloError(f"{name} cannot be read: {why_unread(error, wanted)}") from error
    except ValueError as error:
        raise MedsiloError(f"{name} cannot be read: it has more than {LARGEST_YAML} bytes; correct it") from error


def dump_yaml(value: Any, in_line: bool = False) -> str:
    """Return a value as YAML text that `load_yaml` can read; the keys of each mapping keep the given order.

    Args:
        in_line: Whether to write one line.
    """
    form: dict[str, Any] = {"default_flow_style": True, "width": LARGEST_YAML, "allow_unicode": True} if in_line else {}
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **form)


def why_unread(error: OSError | UnicodeDecodeError, wanted: str) -> str:
    """Describe why a text file can't be read, and the remedy.

    Args:
        wanted: A description of the file that the user should give.
    """
    if isinstance(error, UnicodeDecodeError):
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        return f"it is not UTF-8 (byte 0x{byte:02X} in line {line}); save it as UTF-8"
    if isinstance(error, FileNotFoundError):
        return f"there is no such file; give {wanted}"
    if isinstance(error, IsADirectoryError):
        return f"it is a folder; give {wanted}"
    return f"{os.strerror(error.errno or 0).lower()}; check its permissions"
