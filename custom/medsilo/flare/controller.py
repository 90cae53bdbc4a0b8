"""The one controller of all methods: gives the coordinator its place on NVFlare's server."""

from collections.abc import Callable

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import InfoCollector

from medsilo.errors import Aborted, MedsiloError
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.record import Record, new_study
from medsilo.files import is_safe_name
from medsilo.flare.transport import FlareTransport
from medsilo.flare.wire import let_tensors_travel
from medsilo.flare.workspace import output_folder, plan_of_job, publish, settings_of_site
from medsilo.plan import Plan


class MedsiloController(Controller):
    """Runs the plan that lies in the job."""

    def __init__(self, study: str = "", resume: bool = False, engine: str = "nvflare") -> None:
        """`study` names the run's folder (by default method, task and time); `resume` goes on from its checkpoint."""
        super().__init__(task_check_period=0.05)
        self.study, self.resume, self.engine = study, resume, engine
        self.running: tuple[Plan, Record] | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        let_tensors_travel()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Tell the rounds so far to who asks for the job's statistics, as 'medsilo watch' does."""
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS and self.running:
            plan, record = self.running
            facts = {"study": record.folder.name, "planned": plan.rounds, "metric": plan.task.metric}
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            collector.set_info("medsilo", {**facts, "rounds": record.rounds()})

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            summary = self._lead(abort_signal, fl_ctx)
            self.log_info(fl_ctx, f"medsilo finished: {summary['study']}")
        except Aborted as error:
            self.log_warning(fl_ctx, str(error))
        except MedsiloError as error:
            self.log_error(fl_ctx, f"{error} {error.private}".strip())
            self.system_panic(str(error), fl_ctx)

    def _lead(self, abort_signal: Signal, fl_ctx: FLContext) -> dict:
        plan = plan_of_job(fl_ctx)
        if plan.algorithm.pooled:
            raise MedsiloError(f"{plan.algorithm.name} pools all data and never runs on NVFlare; use 'medsilo compare'")
        study = self.study or new_study(plan)
        if not is_safe_name(study):
            raise MedsiloError(f"study name {study!r} has odd characters; use letters, digits, '.', '_' and '-'")
        settings = settings_of_site(fl_ctx)
        record = Record(output_folder(fl_ctx, settings) / study)
        sites = [client.name for client in self._engine.get_clients()]
        transport = FlareTransport(self, fl_ctx, abort_signal)
        coordinator = Coordinator(plan, sites, transport, record, self.engine, self._tell(fl_ctx), settings)
        self.running = plan, record
        try:
            return coordinator.run(self.resume)
        finally:
            if self.engine == "nvflare":
                publish(record.folder, fl_ctx)

    def _tell(self, fl_ctx: FLContext) -> Callable[[dict], None]:
        def on_round(record: dict) -> None:
            missing = {**record["refused"], **record["lost"]}
            self.log_info(
                fl_ctx,
                f"round {record['round']}: {len(record['answered'])} sites answered, missing: {missing or 'none'}",
            )

        return on_round

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to stop: what the coordinator keeps is on disk after every round."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_warning(fl_ctx, f"a late answer of {client.name} was dropped: its round is over")
