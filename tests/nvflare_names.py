"""List the NVFlare names that medsilo uses, and the keys of files that both medsilo and NVFlare read.

    python -m tests.nvflare_names --write   # record the names that the source uses now
    python -m tests.nvflare_names --known   # record the installed NVFlare's code that nvflare_reliability patches

tests/federation/test_nvflare_names.py compares the recorded list with medsilo's source and with the installed NVFlare.
After an upgrade of NVFlare, tests/federation/test_nvflare_names.py prints the names that NVFlare has removed.

tests/federation/test_patches.py checks NVFlare's internal objects.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medsilo.core.package import PLACE
from nvflare_reliability import kit_patches, patches  # noqa: F401 - which say what they are made for
from nvflare_reliability.compatibility import KNOWN, PLACES, hash_of
from tests.nvflare_uses import has, is_module, uses_of

MODULES = "nvflare"
RECORDED = Path(__file__).with_name("nvflare-uses.json")
# Only these packages import NVFlare; tests/unit/cli/test_houserules.py asserts this rule.
KNOW_NVFLARE = ("medsilo/flare", "medsilo_lab/consortium", "nvflare_reliability")
# Uses of NVFlare that the parser cannot detect: variables of any type, and attributes that medsilo's classes set.
BY_HAND = {
    "apis.shareable.Shareable.get_peer_context",
    "fuel.f3.cellnet.cell.Cell.get_fobs_context",
    "fuel.f3.streaming.blob_streamer.BlobHandler.max_blob_size",
    "fuel.f3.streaming.byte_receiver.RxTask._remove_task",
    "fuel.f3.streaming.byte_receiver.RxTask.stop",
    "private.fed.app.simulator.simulator_runner.SimulatorRunner.run",
}


def stands(use: str) -> bool:
    before, *parts = use.split(".")
    found: Any = import_module(before)
    for part in parts:
        if inspect.ismodule(found):
            before = f"{before}.{part}"
            if not hasattr(found, part) and not is_module(before):
                return False
            found = getattr(found, part) if hasattr(found, part) else import_module(before)
        elif inspect.isclass(found):
            if not has(f"{found.__module__}.{found.__qualname__}", part):
                return False
            found = getattr(found, part, None)
        else:
            return True
    return True


def used() -> set[str]:
    found = {use for room in KNOW_NVFLARE for path in (PLACE / room).glob("*.py") for use in uses_of(path)}
    return {use for use in found if stands(use)} | {f"{MODULES}.{name}" for name in BY_HAND}


@dataclass(frozen=True)
class Key:
    text: str
    means: str


KEYS = (
    # Keys of a job's meta.json and configurations (flare/jobs.py).
    Key("min_clients", "the job waits for so many hospitals"),
    Key("resource_spec", "what the job asks of a hospital's resource manager: nothing"),
    Key("deploy_map", "which parties get the job's app"),
    Key("format_version", "2: components have paths and arguments"),
    Key("task_data_filters", "filters of a job: none"),
    Key("task_result_filters", "filters of a job: none"),
    Key("components", "what a job or a kit has beside its workflow"),
    Key("workflows", "the controller"),
    Key("executors", "the executor, for tasks of all names"),
    Key("tasks", "the names of tasks that an executor takes; `*` for all"),
    Key("executor", "the class of an executor, and its arguments"),
    Key("path", "the class of a component"),
    Key("args", "the arguments of a component"),
    Key("server", "the server's own settings in its configuration"),
    Key("task_request_interval", "seconds between a hospital's questions for work; by default 2"),
    Key("download_chunk_size", "with tensor_ before it: bytes of tensors that are asked for at once"),
    Key("streaming_idle_timeout", "seconds that tensors are held ready for who does not ask for their next piece"),
    Key("max_runner_sync_timeout", "seconds in which a job's process at a site has to reach the server's"),
    Key("dead_client_grace_period", "seconds from the belief that a site is dead until it is lost"),
    Key("scope", "the privacy scope that a job asks for"),
    Key("launcher_spec", "left out of a clone"),
    Key("custom_props", "what a job says of itself beside NVFlare's own keys"),
    # Keys of a kit's local/resources.json (site_configs, consortium/provision.py).
    Key("class_list_enforcement_mode", "enforce: only listed classes are made from a job"),
    Key("class_allow_list", "classes that a job may name; ours are added"),
    Key("allow_log_streaming", "false: no log leaves a hospital"),
    Key("snapshot_persistor", "where a server keeps snapshots"),
    Key("job_manager", "where a server keeps jobs"),
    # Keys of a job's metadata, as the server returns them (consortium/lead.py, flare/workspace.py).
    Key("submitter_name", "who submitted, as NVFlare authenticated them"),
    Key("cloned_from", "the job that this is a clone of"),
    Key("schedule_history", "why a job waits"),
    Key("job_deploy_detail", "why a job could not start"),
    Key("submit_time", "when it was submitted"),
    Key("submit_time_iso", "the same, for people"),
    Key("FINISHED:COMPLETED", "a job whose workflow ended well"),
    # Names of files in a kit, and calls of the container's entry point.
    Key("fed_admin.json", "a person's kit has it"),
    Key("fed_client.json", "a hospital's kit has it"),
    Key("fed_server.json", "a server's kit has it"),
    Key("fed_relay.json", "a relay's kit has it"),
    Key("relay__resources.json", "where the relay is that a hospital is behind, in its kit's local/"),
    Key("comm_config.json", "where a relay listens, in its kit's local/"),
    Key("listening_host", "of a relay in a project file: under which address others reach it"),
    Key("connect_to", "of a participant in a project file: who it connects to"),
    Key("resources.json.default", "what a kit's resources are without ours"),
    Key("authorization.json.default", "who may do what, without ours"),
    Key("client.crt", "a hospital's certificate"),
    Key("client.key", "its key"),
    Key("rootCA.pem", "the consortium's root"),
    Key("sub_start.sh", "runs a kit in the foreground"),
    Key("--once", "of sub_start.sh: not again when it ends"),
    Key("--config", "of `nvflare deploy prepare`"),
    Key("--output", "of `nvflare deploy prepare`"),
)
PATHS = (
    "app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
    "app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
    "app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher",
    "app_common.logging.job_log_streamer.JobLogStreamer",
    "app_common.logging.site_log_streamer.SiteLogStreamer",
    "lighter.impl.workspace.WorkspaceBuilder",
    "lighter.impl.static_file.StaticFileBuilder",
    "lighter.impl.cert.CertBuilder",
    "lighter.impl.signature.SignatureBuilder",
)


def texts_of_nvflare() -> str:
    root = Path(str(import_module(MODULES).__file__)).parent
    files = (path for path in root.rglob("*") if path.suffix in {".py", ".yml", ".sh", ".json", ".default"})
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(files))


def lost_keys(said: str) -> Iterator[str]:
    for key in KEYS:
        if not re.search(rf"(?<![\w.]){re.escape(key.text)}(?![\w])", said) and key.text.partition(":")[0] not in said:
            yield f"{key.text!r} is gone; we rely on it: {key.means}"


def add_installed() -> None:
    """Add the installed NVFlare to the supported versions, after all tests have passed with this version."""
    known = json.loads(KNOWN.read_text("utf-8")) if KNOWN.exists() else {}
    places = sorted({place for own in PLACES.values() for place in own})
    for place in places:
        known[place] = known.get(place, {}) | {version("nvflare"): hash_of(place)}
    KNOWN.write_text(json.dumps({place: known[place] for place in places}, indent=2) + "\n", "utf-8")


def main() -> int:
    if "--write" in sys.argv[1:]:
        RECORDED.write_text(json.dumps(sorted(used()), indent=0) + "\n", "utf-8")
        return 0
    if "--known" in sys.argv[1:]:
        add_installed()
        return 0
    gone = [use for use in json.loads(RECORDED.read_text("utf-8")) if not stands(use)]
    print(*gone, sep="\n")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
