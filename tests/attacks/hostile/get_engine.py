# Tries to reach NVFlare's engine, cell or context, which can send any message to anybody.
import gc
import sys

from lead import learn, tries

WANTED = (
    "ClientEngine",
    "ClientRunner",
    "Cell",
    "CoreCell",
    "FLContext",
    "FLContextManager",
    "Communicator",
    "FederatedClient",
    "RoomSite",
)


def look(model, metrics) -> None:
    tries("an engine", lambda: [type(own).__name__ for own in gc.get_objects() if type(own).__name__ in WANTED][0])
    from nvflare.fuel.data_event.data_bus import DataBus

    tries(
        "what is on the bus",
        lambda: [
            key for key, own in DataBus().data_store.items() if hasattr(own, "get_engine") or hasattr(own, "cell")
        ][0],
    )
    tries(
        "a token",
        lambda: [
            word
            for word in [*sys.argv, *open("/proc/1/cmdline").read().split("\0")]
            if "token" in word or "://" in word
        ][0],
    )


learn(look)
