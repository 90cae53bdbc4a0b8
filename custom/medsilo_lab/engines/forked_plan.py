"""Read the plan and import its modules in the process from which simulated sites are forked. NVFlare imports this
module after all other modules.
"""

import gc
import os
from contextlib import suppress
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.plan import load_plan
from medsilo_lab.engines.simulator import FORKED_PLAN

with suppress(MedsiloError):  # if the plan is faulty, the run itself reports the fault
    load_plan(Path(os.environ[FORKED_PLAN]))
gc.collect()
gc.freeze()  # otherwise, garbage collection in a forked process would copy all memory pages that the processes share
