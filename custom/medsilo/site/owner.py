"""Settings for where one person owns all sites, as in the simulator and in process."""

from typing import Any

# Settings: pictures may lie beside the results, sites may exchange their models, any installed
# package may be used, any number of studies may run, and nobody else sees the numbers, so that they are
# exact.
ALL_MINE: dict[str, Any] = {
    "pictures": True,
    "share_personal_model": True,
    "packages": ("*",),
    "public_data": True,
    "studies": None,
}
