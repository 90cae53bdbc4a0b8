"""Copy data files into the packages of a checkout, so that 'pip install .' installs what both wheels contain.

    python provisioning/package_data.py CHECKOUT

The container image and the conda package are made this way. The data files are the jobs, the example policies and the
documentation pages.
"""

import bz2
import json
import shutil
import sys
from pathlib import Path


def add(checkout: Path) -> None:
    sys.path.insert(0, str(checkout / "custom"))
    from medsilo.cli.documentation import PAGES, pages_of

    shutil.copytree(checkout / "jobs", checkout / "custom/medsilo/jobs")
    shutil.copytree(checkout / "site_configs", checkout / "custom/medsilo_lab/site_configs")
    pages = json.dumps(pages_of(checkout), ensure_ascii=False)
    (checkout / "custom/medsilo" / PAGES.name).write_bytes(bz2.compress(pages.encode()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    add(Path(sys.argv[1]).resolve())
