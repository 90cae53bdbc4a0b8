"""Read the plan in the process from which simulated sites are forked, so that forked sites need not import the plan's
modules. This module must be the last module that the process imports.
"""

import gc
import os
from contextlib import suppress
from pathlib import Path

import torch

from medsilo.core.errors import MedsiloError
from medsilo.plan import load_plan
from medsilo_lab.engines.simulator import FORKED_PLAN

# If a process computes in several threads and then forks, the forked process waits forever.
threads = torch.get_num_threads()
torch.set_num_threads(1)
with suppress(MedsiloError):  # errors of the plan are not reported here, because the run reports them
    load_plan(Path(os.environ[FORKED_PLAN]))
torch.set_num_threads(threads)
gc.collect()
# a garbage collection in a forked process would copy all shared memory pages; gc.freeze prevents this
gc.freeze()
