"""Imported last by the process that simulated sites are forked from: it reads the plan, and what plans import."""

import gc
import os
from contextlib import suppress
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.flare.simulator import FORKED_PLAN
from medsilo.plan import load_plan

with suppress(MedsiloError):  # whoever runs the plan says what is wrong with it
    load_plan(Path(os.environ[FORKED_PLAN]))
gc.collect()
gc.freeze()  # a collection in a fork would write to all pages that it shares
