"""Read before tests/conftest.py, which imports all that tests need and then looks for garbage again."""

import gc
import sys
from typing import Any

gc.disable()  # garbage collection during imports takes a third of their time

# MONAI imports jsonschema, and that a grammar of addresses, if it is there: it takes a second, and no test needs it.
missing: dict[str, Any] = {"rfc3987_syntax": None}
sys.modules.update(missing)
