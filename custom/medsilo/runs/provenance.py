"""Record the versions, plan and seed that produced the results in a folder."""

import importlib.metadata
import platform
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from medsilo.core.files import write_json
from medsilo.runs import paths
from medsilo.runs.site_files import Package, Provenance

if TYPE_CHECKING:
    from medsilo.plan import Plan

PACKAGES = ("nvflare", "torch", "monai", "numpy", "nibabel", "SimpleITK", "pydantic", "safetensors")

version_of = cache(importlib.metadata.version)  # cached, because it reads the metadata of packages from files


def now() -> str:
    """Return the present time in UTC, in the format of run files."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_provenance(folder: Path, plan: "Plan", device: str | None = None) -> None:
    provenance = Provenance(
        packages={name: Package(**facts) for name, facts in plan.code.items()},
        plan_hash=plan.hash,
        seed=plan.seed,
        protocol=plan.protocol,
        started=now(),
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: version_of(name) for name in PACKAGES},
        device=device,
    )
    write_json(folder / paths.PROVENANCE, provenance.model_dump(mode="json", exclude_none=True))
