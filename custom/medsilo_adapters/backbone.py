"""The command `pretrain`."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.show import Command, Screen

LAST = "global/last.safetensors"


def pretrain(
    screen: Screen,
    job: options.Job,
    *,
    plan: options.PlanFile = None,
    changes: options.Changes,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="without labels")] = 20,
    out: options.OutFolder = Path("pretraining"),
) -> int:
    """Write the job that makes a backbone for a job's network: its hospitals train on their images, without labels.

    Run it by `medsilo run` or `medsilo submit`. It ends with a file for `network.from` of the plan with labels.
    """
    screen.begin(f"reading the plan of {job}")
    from medsilo.flare.jobs import plan_of, write_job

    study = plan_of(job, changes, plan)
    network = getattr(study.network, "of", study.network)
    of = f"network={network.model_dump_json()}"
    made = study.with_changes(["algorithm.name=masked-images", of, f"training.rounds={rounds}", "tracking.select=last"])
    write_job(out, made)
    screen.say(f"job: {out}\nnow: medsilo run {out} --name backbone, or medsilo submit {out}")
    begins = f"{{file: runs/backbone/{LAST}, confirmed: true}}"  # of this very network
    tuned = f"{{name: tuned, from: {begins}, of: {{name: {network.name}}}}}"
    screen.say(f"then in the plan with labels, network: {tuned}")
    screen.answer(job=out, hash=made.hash)
    return 0


PRETRAIN = Command(pretrain, "jobs/fedavg --rounds 50 -o pretraining", "For a consortium's lead")
