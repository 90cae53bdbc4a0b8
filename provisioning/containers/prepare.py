"""Run NVFlare's 'deploy prepare' for Kubernetes or Docker, but keep the site's policies.

NVFlare 2.9 builds the resources of the new kit from its defaults, and ignores the site's resources.json. Without this
program, the class allow-list, its enforcement and log streaming would have NVFlare's defaults.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

POLICIES = ("class_allow_list", "class_list_enforcement_mode", "allow_log_streaming")


def prepare(kit: Path, config: Path, output: Path) -> None:
    """Prepare a kit for Kubernetes or Docker, and write the new kit to `output`. Only the settings with which NVFlare
    starts jobs are changed.
    """
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
    left_out = _ids(default) - _ids(own)  # components of NVFlare's defaults that the site has removed
    components = [component for component in new["components"] if component["id"] not in left_out]
    # components that medsilo has added
    components += [component for component in own["components"] if component["id"] not in _ids(default)]
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
