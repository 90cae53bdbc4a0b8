"""Where the numbers in a folder come from."""

import importlib.metadata
import platform
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from medsilo.core.files import write_json
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.site_files import Package, Provenance

PACKAGES = ("nvflare", "torch", "monai", "numpy", "nibabel", "SimpleITK", "pydantic", "safetensors")

version_of = cache(importlib.metadata.version)  # which reads a file of headers


def now() -> str:
    """The time of day, UTC, as it stands in files."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_provenance(folder: Path, plan: Plan, device: str | None = None) -> None:
    """Write where the numbers in a folder come from. device: of a site, what it trains on."""
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
