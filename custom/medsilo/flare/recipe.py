"""A plan as a recipe of NVFlare: the same job as `medsilo submit --out` writes, in any of NVFlare's environments.

NVFlare's own export makes a job's files from the attributes of Python objects, and drops an argument that is kept under
another name. Here the job is written as everywhere else, and NVFlare is given the folder.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import ALL_SITES
from nvflare.job_config.api import FedJob
from nvflare.job_config.fed_job_config import FedJobConfig
from nvflare.recipe import PocEnv, SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from medsilo.core.errors import MedsiloError
from medsilo.flare.jobs import add_code, add_meta, check_components, find_job, plan_of, write_job
from medsilo.flare.simulator import prepare_workspace
from medsilo.plan import Plan, load_plan
from medsilo.site.settings import SiteSettings


class MedsiloRecipe(Recipe):
    """A plan, a plan's file or a job's folder, to be run or exported with NVFlare's Recipe API."""

    def __init__(
        self,
        plan: Plan | str | Path,
        changes: Iterable[str] = (),
        sites: Sequence[str] | None = None,
        with_code: bool = False,
        settings: SiteSettings | None = None,
    ) -> None:
        """Check the plan with its `a.b=value` changes.

        sites: the hospitals that take part, in place of the plan's.
        with_code: the job carries the package, for sites that allow custom code; else they have it installed.
        settings: what SimEnv's hospitals have in their medsilo.yaml. Real hospitals have their own.
        """
        named = [] if sites is None else [f"participation.sites={json.dumps(list(sites))}"]
        self.plan, folder = _read(plan, [*changes, *named])
        if self.plan.algorithm.pooled:
            raise MedsiloError(f"{self.plan.algorithm.name} pools all data and never runs on NVFlare")
        self.with_code, self.settings = with_code, settings or SiteSettings()
        super().__init__(_Job(self.plan, folder, with_code))

    @property
    def sites(self) -> list[str]:
        """The hospitals that the plan names: the clients of a SimEnv or a PocEnv."""
        return list(self.plan.participation.everyone)

    def process_env(self, env: ExecEnv) -> None:
        """Prepare what an environment needs before the job, or say why the job can't run in it."""
        if isinstance(env, SimEnv | PocEnv) and self.sites and sorted(env.clients or []) != self.sites:
            raise MedsiloError(
                f"the plan names {', '.join(self.sites)}; give {type(env).__name__} clients=recipe.sites, or name "
                "others with MedsiloRecipe(..., sites=[...])"
            )
        if isinstance(env, PocEnv) and not self.with_code:
            raise MedsiloError("PocEnv's new kits allow no installed classes but NVFlare's; give with_code=True")
        if isinstance(env, SimEnv):
            workspace = Path(env.workspace_root, self.name).resolve()
            prepare_workspace(workspace, self.settings, self.settings.output or workspace / "medsilo")

    def _apply_per_site_config(self, config: dict[str, dict[str, Any]]) -> None:
        raise MedsiloError("what a site decides is in its own medsilo.yaml; a job can't change it")


def _read(plan: Plan | str | Path, changes: list[str]) -> tuple[Plan, Path | None]:
    """Return the plan, and the job's folder where one was given: its filters, components and code stay."""
    if isinstance(plan, Plan):
        return plan.with_changes(changes), None
    if Path(plan).is_file():
        return load_plan(Path(plan), changes), None
    job = find_job(plan)
    return plan_of(job, changes), job


class _Job(FedJob):
    """A job whose files are written by us: nothing is added to it object by object."""

    def __init__(self, plan: Plan, folder: Path | None, with_code: bool) -> None:
        super().__init__(plan.algorithm.name, plan.participation.required)
        self.job = _JobConfig(plan, folder, with_code)
        self.clients = [] if plan.participation.sites else [ALL_SITES]

    def to(self, obj: Any, target: str, id: str | None = None, **kwargs: Any) -> Any:
        """Refuse what NVFlare would add, and our job would not have."""
        raise MedsiloError(
            f"{type(obj).__name__} can't be added to a medsilo recipe: write it into a job's folder and give "
            "that to MedsiloRecipe"
        )

    def add_file_to(self, src_path: str, target: str, dest_dir: Any = None, app_folder_type: Any = None) -> None:
        """Refuse a file, as `to` refuses an object."""
        self.to(src_path, target)


class _JobConfig(FedJobConfig):
    """The job that FedJob exports, simulates and submits."""

    def __init__(self, plan: Plan, folder: Path | None, with_code: bool) -> None:
        super().__init__(plan.algorithm.name, plan.participation.required)
        self.plan, self.folder, self.with_code = plan, folder, with_code

    def generate_job_config(self, job_root: str) -> None:
        """Write the job into a folder of its name; `set_recipe_meta` adds to its meta.json."""
        job = Path(job_root, self.job_name)
        write_job(job, self.plan, self.folder)
        add_meta(job, self.meta_props or {})
        if self.with_code:
            add_code(job)
        check_components(job)
