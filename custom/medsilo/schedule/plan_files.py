"""Replace the file names in a plan by the contents or the hashes of the files."""

import json
import re
from pathlib import Path
from typing import Any

from medsilo.core import model_folders, weight_cache
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.files import load_tensors, read_bounded
from medsilo.core.tensors import hash_of
from medsilo.core.text import is_safe_name
from medsilo.core.yaml_text import load_yaml, why_unread

FROM_FILES = ("question", "plans")  # keys of a task whose value may be the name of a file in the plan's folder
LARGEST = 8 << 20  # limit on the bytes of a text file
HASH = re.compile(r"[0-9a-f]{64}")


def with_files(values: dict[str, Any], folder: Path, local: bool = False) -> dict[str, Any]:
    """Return the plan's values, with file names replaced by the contents or hashes of the files.

    In the plan's task, the content of a file replaces the file's name. In the plan's network, the hash of the file of
    initial weights is added.

    Args:
        local: Whether all files must be in the plan's folder.
    """
    task, network = values.get("task"), values.get("network")
    if isinstance(network, dict) and (begun := _beginning(network.get("from"), folder, local)):
        values = {**values, "network": {**network, "from": begun}}
    if not isinstance(task, dict):
        return values
    named = {key: task[key] for key in FROM_FILES if isinstance(task.get(key), str) and not HASH.fullmatch(task[key])}
    return {**values, "task": {**task, **{key: _content_of(folder, key, name) for key, name in named.items()}}}


def _beginning(content: Any, folder: Path, local: bool) -> dict[str, Any] | None:
    """Add the hash of the file of initial weights to the plan's section about initial weights.

    The function returns None if the plan names no file of initial weights, or if the plan already contains the file's
    hash.

    Args:
        content: The plan's value of `network.from`, which is the file's name or a section.
    """
    own = {"file": content} if isinstance(content, str) else content
    if not isinstance(own, dict) or "sha256" in own or not isinstance(own.get("file"), str):
        return None
    if local and not is_safe_name(own["file"]):
        raise PlanError("network.from: a job names a file beside its plan, or the file's sha256 and bytes, and no path")
    return {**own, **_begun_with(folder, own["file"])}


def _begun_with(folder: Path, name: str) -> dict[str, Any]:
    # The name may be an absolute path, a path in the user's home, or a path relative to the plan's folder.
    path = folder / Path(name).expanduser()
    if not is_safe_name(path.name):
        raise PlanError(f"network.from: {path.name!r} has odd characters; give the file another name")
    path = next(filter(Path.is_file, (path / name for name in weight_cache.IN_BUNDLES)), path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise PlanError(f"network.from: {path.name} is a device or a pipe, not a regular file; give a regular file")
    model_folders.look_in(path.parent)
    try:
        return {"file": path.name, "sha256": weight_cache.hash_of_file(path), "bytes": path.stat().st_size}
    except OSError as error:
        raise PlanError(f"network.from: {path.name}: {why_unread(error, 'a file beside the plan')}") from error


def _content_of(folder: Path, key: str, name: str) -> Any:
    if not is_safe_name(name):
        raise PlanError(f"task.{key}: {name!r} has odd characters; name a file in the plan's own folder")
    try:
        if name.endswith(".safetensors"):
            return hash_of(load_tensors(folder / name)[0])
        text = read_bounded(folder / name, LARGEST).decode()
        return json.loads(text) if name.endswith(".json") else load_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"task.{key}: {name}: {why_unread(error, 'a file beside the plan')}") from error
    except (MedsiloError, ValueError, RecursionError) as error:
        raise PlanError(f"task.{key}: {name} can't be read ({error}); correct it") from error
