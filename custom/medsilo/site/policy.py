"""Read what the hospital's own files in `local/` allow and hold back, whatever a job says. NVFlare enforces them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError

EXECUTOR = "medsilo.flare.executor.MedsiloExecutor"
ONLY_THESE, ENOUGH = "medsilo.flare.filters.OnlyTheseGroups", "medsilo.flare.filters.EnoughCases"


@dataclass(frozen=True)
class Policy:
    """privacy.json and resources.json of a site."""

    scope: str | None = None  # the privacy scope that holds for the job
    filters: tuple[tuple[str, dict[str, Any]], ...] = ()  # what every answer passes on its way out: class, arguments
    starts: bool = True  # whether NVFlare lets medsilo's executor be built here
    streams_logs: bool = True  # whether error logs may be sent to the server while a job runs
    gpus: int = 0  # that NVFlare must find on this machine; it does not start with fewer

    def lets_out(self, group: str, cases: int | None = None) -> bool:
        """Return whether an answer with this group of tensors, learned from so many training cases if known, leaves."""
        listed = all(group in given["groups"] for path, given in self.filters if path == ONLY_THESE)
        least = [given["least"] for path, given in self.filters if path == ENOUGH and group in given["groups"]]
        return listed and (cases is None or cases >= max(least, default=0))


def read_policy(local: Path, scope: str | None = None) -> Policy:
    """The policy in a kit's `local/`, for a job of this scope; NVFlare's defaults where it says nothing."""
    privacy, resources = _json(local / "privacy.json"), _json(local / "resources.json")
    resources = resources or _json(local / "resources.json.default")
    scope = scope or privacy.get("default_scope")
    chosen: dict[str, Any] = next((one for one in privacy.get("scopes", ()) if one.get("name") == scope), {})
    filters = [
        (one.get("path") or one.get("name", ""), one.get("args", {})) for one in chosen.get("task_result_filters", ())
    ]
    allowed = resources.get("class_allow_list", ())  # NVFlare's own list, where there is none, has no medsilo
    listed = any(entry == "*" or f"{EXECUTOR}.".startswith(f"{entry.rstrip('.')}.") for entry in allowed)
    starts = not resources or listed or resources.get("class_list_enforcement_mode") == "warn"
    given: list[dict[str, Any]] = [one.get("args", {}) for one in resources.get("components", ())]
    gpus = sum(args.get("num_of_gpus", 0) for args in given if not args.get("ignore_host"))
    return Policy(scope, tuple(filters), starts, resources.get("allow_log_streaming") is not False, gpus)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MedsiloError(f"the site's {path.name} cannot be read ({type(error).__name__}); write JSON") from error
    if not isinstance(values, dict):
        raise MedsiloError(f"the site's {path.name} is no JSON object; see site_configs")
    return values
