"""Tracking through NVFlare: what the server has accepted becomes its analytics events, and its receivers keep them.

Sites send no events of their own: they would pass by the filters with which a hospital decides what leaves it.
"""

from collections.abc import Iterable
from pathlib import Path

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsDataType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import EventScope, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.analytix_utils import create_analytic_dxo
from nvflare.app_common.widgets.streaming import AnalyticsReceiver
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver

from medsilo.federation.tracking import SERVER, Points, address, check_mlflow
from medsilo.flare.patches import mlflow_receiver
from medsilo.plan import Plan
from medsilo.runs.paths import MLFLOW_FILES, TENSORBOARD

WHOSE = "medsilo.whose"


def send(sender: FLComponent, course: Iterable[Points], fl_ctx: FLContext) -> None:
    """Fire an event for each point."""
    for who, own in (pair for points in course for pair in points.items()):
        for name, value, step in own:
            event = create_analytic_dxo(name, value, AnalyticsDataType.SCALAR, global_step=step).to_shareable()
            event.set_header(WHOSE, who)
            fl_ctx.set_prop(FLContextKey.EVENT_DATA, event, private=True, sticky=False)
            sender.fire_event(ANALYTIC_EVENT_TYPE, fl_ctx)


def receivers(plan: Plan, run: Path, sites: list[str]) -> list[AnalyticsReceiver]:
    """NVFlare's receivers that the plan asks for, with their files in the run's folder."""
    found: list[AnalyticsReceiver] = [TensorBoard(run)]
    if plan.tracking.mlflow:
        found.append(_mlflow(run, sites))
    return found


def _mlflow(run: Path, sites: list[str]) -> AnalyticsReceiver:
    """The study is an experiment in a database of its own, the server and each site a run of it."""
    check_mlflow()
    files = str((run / MLFLOW_FILES).resolve())
    return mlflow_receiver(address(run), run.name, files, [SERVER, *sites], [ANALYTIC_EVENT_TYPE], origin)


def origin(fl_ctx: FLContext, data: Shareable) -> str | None:
    """Return the site of a point; nobody when a site fired the event itself."""
    own = fl_ctx.get_prop(FLContextKey.EVENT_SCOPE) != EventScope.FEDERATION
    return data.get_header(WHOSE) if own else None


class TensorBoard(TBAnalyticsReceiver):
    """NVFlare's, with a folder for each site and one for the server in the run's folder."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.folder = run / TENSORBOARD

    def initialize(self, fl_ctx: FLContext) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.root_log_dir = str(self.folder)

    def save(self, fl_ctx: FLContext, shareable: Shareable, record_origin: str) -> None:
        if who := origin(fl_ctx, shareable):
            super().save(fl_ctx, shareable, who)
            self.writers_table[who].flush()
