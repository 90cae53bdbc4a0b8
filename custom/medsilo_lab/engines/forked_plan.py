"""Read the plan and import its modules in the process from which simulated sites are forked. This module is imported
after all other modules.
"""

import gc
import os
from contextlib import suppress
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.plan import load_plan
from medsilo_lab.engines.simulator import FORKED_PLAN

with suppress(MedsiloError):  # a faulty plan is reported by the run itself
    load_plan(Path(os.environ[FORKED_PLAN]))
gc.collect()
# without freezing, a garbage collection in a forked process would copy all memory pages that the processes share
gc.freeze()
