"""NVFlare's 'deploy prepare' (Kubernetes or Docker) that keeps the site's own policies.

NVFlare 2.9 builds the new kit's resources from its default and leaves the site's resources.json out. Class allow-list,
enforcement and log streaming would then be NVFlare's again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

POLICIES = ("class_allow_list", "class_list_enforcement_mode", "allow_log_streaming")


def prepare(kit: Path, config: Path, output: Path) -> None:
    """Make `output` from a kit. Only the settings with which NVFlare starts jobs are new."""
    command = [sys.executable, "-m", "nvflare.cli", "deploy", "prepare", kit, "--config", config, "--output", output]
    subprocess.run([str(word) for word in command], check=True)
    own, default, new = (
        _read(folder / "local" / name)
        for folder, name in (
            (kit, "resources.json"),
            (kit, "resources.json.default"),
            (output, "resources.json.default"),
        )
    )
    left_out = _ids(default) - _ids(own)  # classes that the site left out
    components = [component for component in new["components"] if component["id"] not in left_out]
    components += [component for component in own["components"] if component["id"] not in _ids(default)]  # medsilo's
    policies = {key: own[key] for key in POLICIES if key in own}
    path = output / "local" / "resources.json"
    path.write_text(json.dumps({**new, **policies, "components": components}, indent=2) + "\n")
    print(f"policies: {path}")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _ids(resources: dict[str, Any]) -> set[str]:
    return {component["id"] for component in resources["components"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, text in (("kit", "as it was provisioned"), ("config", "kubernetes.yaml"), ("output", "a new folder")):
        parser.add_argument(name, type=Path, help=text)
    options = parser.parse_args()
    prepare(options.kit, options.config, options.output)
