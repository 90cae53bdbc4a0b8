"""A further process that trains for a site: it has the first one's state and draws, and keeps and sends nothing."""

import os
import select
import sys
from pathlib import Path
from socket import socket
from threading import Thread
from typing import Any

from torch.utils.data import Subset

from medsilo.core import shelf
from medsilo.core.tensors import Tensors
from medsilo.federation.crew import join_team, limit_memory
from medsilo.federation.process.frames import receive, send
from medsilo.federation.protection import Protection
from medsilo.federation.reasons import details, public_reason
from medsilo.federation.seams import Place
from medsilo.federation.site_state import SiteState
from medsilo.federation.trainer import SHUFFLE, Trainer
from medsilo.learning.seeds import seed_for
from medsilo.learning.team import fingerprint
from medsilo.site.settings import SiteSettings


class MemberTrainer(Trainer):
    """The site as a member of its crew has it."""

    def __init__(self, place: Place, rank: int) -> None:
        shelf.look_in(*place.models)
        protection = Protection(place)
        source = protection.source(writes=False)  # the first process has read the data before
        data = place.plan.task.site_data(place.site, sorted(place.sites), place.plan.seed, source)
        state = SiteState(place.plan, place.site, Path(os.devnull), place.settings.compute(rank))
        super().__init__(place, data, state, protection)

    def round(self, told: dict[str, Any], tensors: Tensors) -> str:
        """Train as the first process does; returns the fingerprint of what came of it."""
        number, plan = told["round"], self.place.plan
        self.train = self.data.train if told["chosen"] is None else Subset(self.data.train, told["chosen"])
        self.state.take(tensors, told["groups"])
        with self.compute.reproducible(seed_for(plan.seed, self.place.site, "work", number)):
            plan.course.phase_of(number).work(self.bench(SHUFFLE, number, lambda: None))
        return fingerprint(self.state.tensors().values())


def main(end: socket) -> None:
    """Train round after round until the first process is gone."""
    told, _ = receive(end)
    Thread(target=_end_with, args=[end], daemon=True).start()
    limit_memory(SiteSettings.model_validate(told["settings"]))
    try:
        place = Place.read(told)
        trainer = MemberTrainer(place, told["rank"])
        send(end, {"cases": trainer.mark_of_cases()})
        trainer.team = join_team(told["rank"], place.settings, told["meeting"])
        while True:
            message, groups = receive(end)
            send(end, {"trained": trainer.round(message, groups["state"])})
    except EOFError:
        pass
    except Exception as error:
        send(end, {"reason": public_reason(error), "details": details(error)})
        raise


def _end_with(end: socket) -> None:
    """End this process with the one at the other end, in the middle of a batch, too."""
    poll = select.poll()
    poll.register(end, select.POLLHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main(socket(fileno=int(sys.argv[1])))
