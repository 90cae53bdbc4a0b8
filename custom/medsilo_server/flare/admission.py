"""Reject each job that names an unknown hospital. This component runs in the server's parent process.

Without the check of names, a job that names an unknown hospital would wait for this hospital for a week.
"""

import json
from collections.abc import Iterator
from contextlib import suppress

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME, JobMetaKey

from medsilo.core.text import plain
from medsilo.flare.workspace import kit_folder, settings_folder
from medsilo.runs import event_reading, events
from medsilo.site.kit import HOSPITALS


class KnownHospitals(FLComponent):
    """Rejects each job that names an unknown hospital.

    A hospital is unknown if the server's startup kit does not list the hospital and the hospital has never connected to
    the server.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.SUBMIT_JOB:
            return
        meta = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
        known = {client.name for client in fl_ctx.get_engine().get_clients()} | set(
            event_reading.connected(kit_folder(fl_ctx))
        )
        with suppress(OSError, ValueError, KeyError):
            path = settings_folder(fl_ctx) / HOSPITALS
            known.update(map(str, json.loads(path.read_text(encoding="utf-8"))["hospitals"]))
        if unknown := sorted(named_in(meta.get(JobMetaKey.DEPLOY_MAP.value)) - known):
            told = f"no hospital here is called {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}"
            reason = plain(f"{told}. A new one connects first")
            fl_ctx.set_prop(FLContextKey.JOB_BLOCK_REASON, reason, private=True, sticky=False)
            lead = meta.get(JobMetaKey.SUBMITTER_NAME.value) or "nobody"
            events.write(kit_folder(fl_ctx), events.Event("refused", f"a job of {lead}: {reason}", by=lead))


def named_in(deploy_map: object) -> set[str]:
    apps = deploy_map.values() if isinstance(deploy_map, dict) else ()
    return {name for app in apps for name in _names(app) if name != SERVER_SITE_NAME and name.upper() != ALL_SITES}


def _names(message: object) -> Iterator[str]:
    """Yield the site names in an entry of a deploy_map.

    An entry is a name, a list of entries, or a mapping that has an entry under `sites` or `targets`.
    """
    if isinstance(message, str):
        yield message
    for one in message if isinstance(message, list) else ():
        yield from _names(one)
    if isinstance(message, dict):
        for key in ("sites", "targets"):
            yield from _names(message.get(key))
