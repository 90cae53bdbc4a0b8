"""Show the scores and losses of a study in the trackers that a job adds, such as NVFlare's TBAnalyticsReceiver."""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData, AnalyticsDataType
from nvflare.apis.fl_constant import EventScope, FedEventHeader, FLContextKey, ReservedKey
from nvflare.apis.server_engine_spec import ServerEngineSpec

from medsilo_server.flare.artifacts import tracked_numbers


def show_in_trackers(line: Mapping[str, Any], engine: ServerEngineSpec) -> None:
    """Fire an event of NVFlare's experiment tracking at the server for each number in a line of round_metrics.jsonl.

    The events look as if they came from the sites, so that receivers show each site's numbers separately. A header in
    each event prevents NVFlare from sending the event to the sites.

    Args:
        line: A line of round_metrics.jsonl.
        engine: The server's engine.
    """
    for site, numbers in tracked_numbers(line).items():
        for tag, number in numbers.items():
            data = AnalyticsData(tag, number, AnalyticsDataType.SCALAR, global_step=line["round"])
            event = data.to_dxo().to_shareable()
            event.set_header(FedEventHeader.DIRECTION, "in")
            event.set_peer_props({ReservedKey.IDENTITY_NAME: site})
            with engine.new_context() as fl_ctx:
                fl_ctx.set_prop(FLContextKey.EVENT_DATA, event, private=True, sticky=False)
                fl_ctx.set_prop(FLContextKey.EVENT_SCOPE, EventScope.FEDERATION, private=True, sticky=False)
                engine.fire_event(f"fed.{ANALYTIC_EVENT_TYPE}", fl_ctx)
