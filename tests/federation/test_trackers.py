"""A job with a receiver of NVFlare's experiment tracking shows the scores and losses of its study."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from medsilo.flare.job_source import CONFIG
from medsilo.flare.jobs import CLIENT, SERVER
from medsilo.runs.rounds import Round
from medsilo_lab.engines import simulator
from tests.conftest import SITES, make_plan
from tests.events import assert_same_curves, curves_in, curves_of
from tests.sites import CPU


def receiver_of_the_page(root: Path) -> dict[str, Any]:
    """Return the component that the documentation adds to a job."""
    page = (root / "docs/research/compare.md").read_text("utf-8").partition("## Curves in a tracker")[2]
    found = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.slow
def test_a_job_s_tracker_shows_each_round_once_even_if_the_run_is_resumed(root: Path, tmp_path: Path) -> None:
    job = tmp_path / "job"
    shutil.copytree(root / "jobs/fedavg", job)
    for name in (SERVER, CLIENT):
        config = json.loads((job / CONFIG / name).read_text())
        config["components"].append(receiver_of_the_page(root))
        (job / CONFIG / name).write_text(json.dumps(config))

    def stop(line: Round) -> None:
        raise KeyboardInterrupt

    plan, run = make_plan("fedavg", "training.rounds=4", sites=SITES[:2]), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulator.run(plan, run, CPU, job, on_round=stop)
    simulator.resume(run, CPU)
    shown = run / "nvflare/server/simulate_job/tb_events"
    assert_same_curves(curves_in(shown), curves_of(run))
    # The sites' receivers show nothing, because the events stay at the server.
    at_sites = [run / "nvflare" / site / "simulate_job" / shown.name for site in SITES[:2]]
    assert [[*place.iterdir()] for place in at_sites] == [[], []]
