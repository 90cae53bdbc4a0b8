"""Read what the hospital's own files in `local/` allow and hold back, whatever a job says. NVFlare enforces them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from medsilo.core.errors import MedsiloError
from medsilo.core.text import plain

EXECUTOR = "medsilo.flare.executor.MedsiloExecutor"
ONLY_THESE = "medsilo.flare.filters.OnlyTheseGroups"
CONTROLLER = "medsilo.flare.controller.MedsiloController"  # what our jobs name at the server
REMEDY = "name single classes there, as site_configs/strict-hospital does"
# NVFlare's classes that touch no file but the job's own logs. Others write, read or delete files that a job names.
HARMLESS = (
    "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",  # NVFlare adds it where allow_log_streaming is true
    "nvflare.app_common.filters.exclude_vars.ExcludeVars",
    "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy",
    "nvflare.app_common.filters.svt_privacy.SVTPrivacy",
)


@dataclass(frozen=True)
class Policy:
    """privacy.json and resources.json of a site."""

    scope: str | None = None  # the privacy scope that holds for the job
    filters: tuple[tuple[str, dict[str, Any]], ...] = ()  # what every answer passes on its way out: class, arguments
    starts: bool = True  # whether NVFlare lets medsilo's executor be built here
    streams_logs: bool = True  # whether error logs may be sent to the server while a job runs
    gpus: int = 0  # that NVFlare must find on this machine; it does not start with fewer

    def lets_out(self, group: str) -> bool:
        """Return whether an answer with this group of tensors leaves."""
        return all(group in given["groups"] for path, given in self.filters if path == ONLY_THESE)

    @classmethod
    def read(cls, local: Path, scope: str | None = None) -> Self:
        """Return that of a kit's `local/`, for a job of this scope; NVFlare's defaults where it says nothing."""
        privacy, resources = _json(local / "privacy.json"), _json(local / "resources.json")
        resources = resources or _json(local / "resources.json.default")
        scope = scope or privacy.get("default_scope")
        chosen: dict[str, Any] = next((one for one in privacy.get("scopes", ()) if one.get("name") == scope), {})
        results = chosen.get("task_result_filters", ())
        filters = [(one.get("path") or one.get("name", ""), one.get("args", {})) for one in results]
        allowed = resources.get("class_allow_list", ())  # NVFlare's own list, where there is none, has no medsilo
        listed = any(entry == "*" or f"{EXECUTOR}.".startswith(f"{entry.rstrip('.')}.") for entry in allowed)
        starts = not resources or listed or resources.get("class_list_enforcement_mode") == "warn"
        given: list[dict[str, Any]] = [one.get("args", {}) for one in resources.get("components", ())]
        gpus = sum(args.get("num_of_gpus", 0) for args in given if not args.get("ignore_host"))
        return cls(scope, tuple(filters), starts, resources.get("allow_log_streaming") is not False, gpus)


def ways_around(local: Path) -> list[tuple[str, str]]:
    """Return what lets a job reach a hospital's own files, medsilo.yaml among them, and what to do about each."""
    resources = _json(local / "resources.json") or _json(local / "resources.json.default")
    rights = _json(local / "authorization.json") or _json(local / "authorization.json.default")
    found = []
    if resources and resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        found.append(("class_list_enforcement_mode in local/resources.json is not enforce", "set it to enforce"))
    listed = resources.get("class_allow_list")
    if resources and listed is None:
        found.append(("local/resources.json has no class_allow_list, so NVFlare's own holds", REMEDY))
    elif wide := [entry for entry in listed or () if _is_wide(str(entry))]:
        told = f"class_allow_list in local/resources.json has {plain(', '.join(map(str, wide[:3])), 200)}"
        found.append((f"{told}{' and more' if wide[3:] else ''}: classes that write or delete files", REMEDY))
    roles = rights.get("permissions", {})
    if sending := sorted(role for role, own in roles.items() if _may_send(own)):
        told = f"local/authorization.json lets {plain(', '.join(sending), 200)} send code, which may change anything"
        found.append((told, "set byoc to none there"))
    return found


def _may_send(own: Any) -> bool:
    """Return whether a role may send code; one condition in place of rights is for all of them, as NVFlare reads it."""
    if isinstance(own, dict):
        own = {" ".join(name.lower().split()): rule for name, rule in own.items()}.get("byoc", "none")
    return bool(own != "none")


def _is_wide(entry: str) -> bool:
    """Return whether an entry of class_allow_list is more than one class, or a class that reaches files."""
    name = entry.rpartition(".")[2].lstrip("_")
    return not name[:1].isupper() or (entry.startswith("nvflare.") and entry not in HARMLESS)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MedsiloError(f"the site's {path.name} cannot be read ({type(error).__name__}); write JSON") from error
    if not isinstance(values, dict):
        raise MedsiloError(f"the site's {path.name} is no JSON object; see site_configs")
    return values
