"""Read a hospital's NVFlare policy: privacy scopes, allowed classes, and the roles that may send code."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from medsilo.core.errors import MedsiloError
from medsilo.core.text import plain

EXECUTOR = "medsilo.flare.executor.MedsiloExecutor"
ONLY_THESE = "medsilo.flare.filters.OnlyTheseGroups"
GUARD = "site_guard.Guard"  # name of a kit's component that rejects code which the hospital has not approved
REMEDY = "name single classes there, as site_configs/strict-hospital does"
# NVFlare's classes that access no files except the job's logs. All classes of NVFlare that are not in this list count
# as able to access files that a job names.
HARMLESS = (
    # NVFlare adds this class if allow_log_streaming is true
    "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
    "nvflare.app_common.filters.exclude_vars.ExcludeVars",
    "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy",
    "nvflare.app_common.filters.svt_privacy.SVTPrivacy",
)


@dataclass(frozen=True)
class Policy:
    scope: str | None = None  # the privacy scope of NVFlare that the job names
    filters: tuple[tuple[str, dict[str, Any]], ...] = ()  # for each filter on answers: the class and the arguments
    starts: bool = True  # whether NVFlare's list of allowed classes contains medsilo's executor
    streams_logs: bool = True  # whether a job's error logs may be streamed to the server
    gpus: int = 0  # number of GPUs that the machine must have so that NVFlare starts

    def lets_out(self, group: str) -> bool:
        return all(group in given["groups"] for path, given in self.filters if path == ONLY_THESE)

    @classmethod
    def read(cls, local: Path, scope: str | None = None) -> Self:
        """Read the policy for a job's privacy scope; if a file is missing, NVFlare's defaults apply."""
        privacy, resources = _json(local / "privacy.json"), _json(local / "resources.json")
        resources = resources or _json(local / "resources.json.default")
        scope = scope or privacy.get("default_scope")
        chosen: dict[str, Any] = next((one for one in privacy.get("scopes", ()) if one.get("name") == scope), {})
        results = chosen.get("task_result_filters", ())
        filters = [(result.get("path") or result.get("name", ""), result.get("args", {})) for result in results]
        # the list that NVFlare uses by default does not allow medsilo's classes
        allowed = resources.get("class_allow_list", ())
        listed = any(entry == "*" or f"{EXECUTOR}.".startswith(f"{entry.rstrip('.')}.") for entry in allowed)
        starts = not resources or listed or resources.get("class_list_enforcement_mode") == "warn"
        given: list[dict[str, Any]] = [one.get("args", {}) for one in resources.get("components", ())]
        gpus = sum(args.get("num_of_gpus", 0) for args in given if not args.get("ignore_host"))
        return cls(scope, tuple(filters), starts, resources.get("allow_log_streaming") is not False, gpus)


def ways_around(local: Path) -> list[tuple[str, str]]:
    """Return the NVFlare settings that let a job access a hospital's files, such as medsilo.yaml, each with a
    remedy.
    """
    resources = _json(local / "resources.json") or _json(local / "resources.json.default")
    found = []
    if resources and resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        found.append(("class_list_enforcement_mode in local/resources.json is not enforce", "set it to enforce"))
    listed = resources.get("class_allow_list")
    if resources and listed is None:
        found.append(("local/resources.json has no class_allow_list, so NVFlare's own holds", REMEDY))
    elif wide := [entry for entry in listed or () if _is_wide(str(entry))]:
        told = f"class_allow_list in local/resources.json has {plain(', '.join(map(str, wide[:3])), 200)}"
        found.append((f"{told}{' and more' if wide[3:] else ''}: classes that write or delete files", REMEDY))
    guarded = any(one.get("path") == GUARD for one in resources.get("components") or ())
    if not guarded and (sending := code_senders(local)):
        told = f"local/authorization.json lets {plain(', '.join(sending), 200)} send code, which may change anything"
        todo = f"set byoc to none there, or keep {GUARD} among the components of local/resources.json"
        found.append((told, todo))
    return found


def code_senders(local: Path) -> list[str]:
    rights = _json(local / "authorization.json") or _json(local / "authorization.json.default")
    return sorted(role for role, own in rights.get("permissions", {}).items() if _may_send(own))


def _may_send(limits: Any) -> bool:
    """Return True if a role's rights allow jobs with code. In NVFlare, a role has a mapping of rights to conditions, or
    one condition, which then applies to all rights.
    """
    if isinstance(limits, dict):
        limits = {" ".join(name.lower().split()): rule for name, rule in limits.items()}.get("byoc", "none")
    return bool(limits != "none")


def _is_wide(entry: str) -> bool:
    """Return True if an entry of class_allow_list allows more than one class, or a class that can access files."""
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
        raise MedsiloError(f"the site's {path.name} is not a JSON object; see site_configs for examples")
    return values
