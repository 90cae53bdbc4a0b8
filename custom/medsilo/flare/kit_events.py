"""What writes into a kit's events.log in the kit's own process; study_events.py has what studies write."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.fqcn import FQCN

from medsilo.core.text import plain
from medsilo.flare.workspace import kit_folder
from medsilo.runs.events import SILENCE, Event, write
from nvflare_reliability.cleanup import LostConnections

LOOK = 2.0  # seconds between two looks at the connections
GRACE = 10.0  # seconds without a connection until a party is away: one that broke is often made again
SETTLED = 60.0  # seconds after a return in which its processes may still register
AGAIN = 3600.0  # seconds until it is written once more that the same party is refused, which asks every few seconds
TWICE = 30.0  # seconds in which the process of a kit that is stopped may still be heard beside the next one


@dataclass(frozen=True)
class Seen:
    """A party at one look: whether a connection to it is open, and when it was heard, by a clock that may jump."""

    connected: bool
    last_heard: float
    token: str = ""  # is another one after its processes were started again


@dataclass
class Attendance:
    """Who is there, who is away and since when nothing was seen of them."""

    direct: set[str] = field(default_factory=set)  # whose connection was seen once
    heard: dict[str, tuple[float, float]] = field(default_factory=dict)  # last_heard, and when it was new
    lost: dict[str, float] = field(default_factory=dict)  # since when a connection is gone
    there: dict[str, bool] = field(default_factory=dict)
    returned: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)

    def look(self, seen: Mapping[str, Seen], now: float) -> Iterator[Event]:
        """Yield what changed since the last look. now: in seconds of a clock that nobody sets."""
        for name, one in seen.items():
            if self.heard.get(name, (None,))[0] != one.last_heard:
                self.heard[name] = one.last_heard, now
        self.direct.update(name for name, one in seen.items() if one.connected)
        for name in sorted({*seen, *self.there}):
            why = self._missing(name, seen.get(name), now)
            was = self.there.get(name)
            if why is None and was is not True:
                self.there[name] = True
                yield self._back(name, now, "connected") if was is False else Event("joined", "connected", name)
            elif why is None and seen[name].token != self.tokens.get(name, seen[name].token):
                if now - self.returned.get(name, -math.inf) > SETTLED:
                    yield self._back(name, now, "connected, its processes were started again")
            elif why and was:
                self.there[name] = False
                yield Event("away", why, name, needs_somebody=True)
        self.tokens |= {name: one.token for name, one in seen.items()}

    def _back(self, name: str, now: float, text: str) -> Event:
        self.returned[name] = now
        return Event("back", text, name)

    def _missing(self, name: str, seen: Seen | None, now: float) -> str | None:
        """Return why one is away, None where it is there, and "" where a lost connection may be made again."""
        if seen is None:
            return "it signed off, or the server gave it up"
        if seen.connected or name not in self.direct:
            self.lost.pop(name, None)
            silent = now - self.heard[name][1]
            return f"it was silent for {silent:.0f} s" if silent > SILENCE else None
        since = self.lost.setdefault(name, now)
        return f"its connection is gone for {now - since:.0f} s" if now - since > GRACE else ""


class ServerEvents(FLComponent):
    """Writes who is there, and who is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, float] = {}  # by reason, when it was written
        self.attendance = Attendance()
        self.twice: dict[str, tuple[float, float]] = {}  # hospitals with two processes: heard first and last so

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            write(kit_folder(fl_ctx), Event("started", "the server, to which nobody is connected yet"))
            threading.Thread(target=self._watch, args=(fl_ctx.get_engine(), kit_folder(fl_ctx)), daemon=True).start()
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED:
            self._registered(fl_ctx)
        elif event_type == EventType.CLIENT_HEARTBEAT_PROCESSED:
            self._heard(fl_ctx)

    def _watch(self, engine: Any, kit: Path) -> None:
        while not engine.server.shutdown:
            with suppress(Exception):  # one look that fails is made good by the next
                for event in self.attendance.look(connections(engine), time.monotonic()):
                    write(kit, event)
            time.sleep(LOOK)

    def _registered(self, fl_ctx: FLContext) -> None:
        """Write down whom the server did not let in."""
        self._refuse(plain(fl_ctx.get_prop(FLContextKey.UNAUTHENTICATED) or ""), fl_ctx)

    def _heard(self, fl_ctx: FLContext) -> None:
        """See to a kit that was started twice: NVFlare knows the process that registered last, and none of the other.

        Where that one is away, the other takes its place at its next heartbeat; NVFlare lets it wait ten minutes.
        """
        name = (fl_ctx.get_prop(FLContextKey.COMMUNICATION_ERROR) or "").rpartition(": ")[2]
        if not name:
            return
        now, engine = time.monotonic(), fl_ctx.get_engine()
        first, last = self.twice.get(name, (now, now))
        self.twice[name] = first if now - last < TWICE else now, now
        if self.attendance.there.get(name) is False:
            for gone in [client.token for client in engine.get_clients() if client.name == name]:
                engine.server.logout_client(gone)
        elif now - self.twice[name][0] > TWICE:
            self._refuse(f"two processes run with the kit of {name}; the later one has its jobs: end the other", fl_ctx)

    def _refuse(self, reason: str, fl_ctx: FLContext) -> None:
        now = time.monotonic()
        self.refused = {reason: then for reason, then in self.refused.items() if now - then < AGAIN}
        if reason and reason not in self.refused:
            self.refused[reason] = now
            write(kit_folder(fl_ctx), Event("refused", reason, needs_somebody=True))


def connections(engine: Any) -> dict[str, Seen]:
    """Return the hospitals that are registered at the server."""
    cell = engine.get_cell()
    return {
        client.name: Seen(cell.is_cell_connected(client.get_fqcn()), client.last_connect_time or 0.0, client.token)
        for client in engine.get_clients()
    }


class HospitalEvents(LostConnections):
    """Writes when a hospital's connection to the server is made, lost, and made again, and why jobs are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.attendance, self.last_heard = Attendance(), 0.0

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.AFTER_CLIENT_HEARTBEAT:
            self.last_heard = time.monotonic()
        elif event_type == EventType.AFTER_CLIENT_REGISTER:
            self.last_heard = time.monotonic()
            threading.Thread(target=self._watch, args=(fl_ctx.get_engine(), kit_folder(fl_ctx)), daemon=True).start()

    def _watch(self, engine: Any, kit: Path) -> None:
        while True:
            with suppress(Exception):
                server = Seen(engine.get_cell().is_cell_connected(FQCN.ROOT_SERVER), self.last_heard)
                for event in self.attendance.look({"the server": server}, time.monotonic()):
                    write(kit, event)
            time.sleep(LOOK)
