"""The model as CycloneDX ML-BOM: how it is trained, on what, by which packages; of a run the hashes of its rounds."""

import hashlib
import json
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from medsilo.core import shelf
from medsilo.core.errors import MedsiloError
from medsilo.core.package import package_facts
from medsilo.flare.jobs import plan_of
from medsilo.runs import paths
from medsilo_record.facts import Case

OWN = "medsilo"
UNKNOWN = "not stated"
LONGEST_LICENCE = 60  # characters; a longer text is the licence itself
NAMES = uuid.UUID("6d656473-696c-5f72-9563-6f7264000001")  # of the serial numbers
PREFIX = ":".join(("medsilo", ""))
Fact = dict[str, str]


def as_cyclonedx(case: Case, run: Path | None) -> str:
    """Return model.cdx.json. run: a run of this plan."""
    plan, build = case.plan, package_facts()
    rounds, files = _of_run(run, case) if run else ([], [])
    training = plan.training.model_dump(mode="json")
    facts = [_fact(f"training:{key}", value) for key, value in training.items()]
    facts += [
        _fact("plan", plan.hash),
        _fact("method", plan.algorithm.name),
        _fact("hospitals", len(plan.participation.everyone)),
    ]
    card = {
        "modelParameters": {
            "approach": {"type": "supervised"},
            "task": plan.task.name,
            "architectureFamily": plan.network.name,
            "modelArchitecture": f"{plan.parameters:,} parameters",
            "datasets": [{"ref": "data"}],
        },
        "properties": facts + rounds,
    }
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": f"{plan.algorithm.name} on {plan.task.name}",
        "version": plan.hash[:12],
        "modelCard": card,
    }
    packages = installed()
    medsilo = {"type": "application", "name": OWN, "version": build["version"], "hashes": _hash(build["hash"])}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"tools": {"components": [medsilo]}, "component": model},
        "components": [_data(case), *files, *packages],
        "dependencies": [{"ref": "model", "dependsOn": ["data", *(own["bom-ref"] for own in packages)]}],
    }
    serial = uuid.uuid5(NAMES, json.dumps(document, sort_keys=True))
    return json.dumps({**document, "serialNumber": f"urn:uuid:{serial}"}, indent=1, ensure_ascii=False) + "\n"


def _data(case: Case) -> dict[str, Any]:
    """Return the hospital's data in counts, in its own steps."""
    counts = {what: case.counted(what) for what in ("cases", "patients")}
    own = {
        "type": "dataset",
        "name": f"data of {case.site or 'one hospital'}",
        "classification": "synthetic" if case.synthetic else "health data (GDPR Art. 9)",
        "contents": {"properties": [_fact(what, count) for what, count in counts.items() if count is not None]},
    }
    return {"type": "data", "bom-ref": "data", "name": "training data", "data": [own]}


def installed() -> list[dict[str, Any]]:
    """Return all packages of this Python, in the order of their names; of two of a name the one that is imported."""
    found: dict[str, dict[str, Any]] = {}
    for own in metadata.distributions():
        name = own.metadata["Name"]
        if not name or name.lower() in found:
            continue
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{own.version}"
        licences = [{"license": {"name": licence_of(own.metadata)}}]
        told = {"type": "library", "bom-ref": purl, "name": name, "version": own.version, "purl": purl}
        found[name.lower()] = {**told, "licenses": licences, "hashes": _hashes(own, name)}
    return [found[name] for name in sorted(found)]


def licence_of(facts: metadata.PackageMetadata) -> str:
    """Return a package's licence, as it states it in any of three ways."""
    stated, short = ("".join(facts.get_all(key) or ()) for key in ("License-Expression", "License"))
    classes = [line.rpartition("::")[2].strip() for line in facts.get_all("Classifier") or () if "License ::" in line]
    if not stated and short and len(short) <= LONGEST_LICENCE and short.upper() != "UNKNOWN":
        stated = short
    return " ".join((stated or ", ".join(classes) or UNKNOWN).split())


def _hashes(own: metadata.Distribution, name: str) -> list[Fact]:
    """Return the hash of a package as it is installed: over its RECORD, which has the hash of each of its files."""
    if name.lower() == OWN:
        return _hash(package_facts()["hash"])
    record = own.read_text("RECORD")
    return _hash(hashlib.sha256(record.encode()).hexdigest()) if record else []


def _of_run(run: Path, case: Case) -> tuple[list[Fact], list[dict[str, Any]]]:
    """Return the hashes of a run's rounds, and its models with theirs."""
    if plan_of(run / paths.PLAN, allowed=case.settings.packages).hash != case.plan.hash:
        raise MedsiloError("--run: that run is of another plan; give the plan that lies in the run's folder, plan.yaml")
    lines = (run / paths.ROUNDS).read_bytes().splitlines()
    hashes = (hashlib.sha256(line).hexdigest() for line in lines)
    rounds = [_fact(f"round:{number:05d}:sha256", digest) for number, digest in enumerate(hashes, 1)]
    models = [
        path for folder in (paths.GLOBAL, paths.SUPER_MODEL) for path in sorted((run / folder).rglob("*.safetensors"))
    ]
    if not models:
        rounds.append(_fact("models", "none that all hospitals share: each keeps its own"))
    return rounds, [
        {"type": "file", "bom-ref": f"model:{number}", "name": path.name, "hashes": _hash(shelf.hash_of_file(path))}
        for number, path in enumerate(models)
    ]


def _hash(content: str) -> list[Fact]:
    return [{"alg": "SHA-256", "content": content}]


def _fact(name: str, value: object) -> Fact:
    return {"name": f"{PREFIX}{name}", "value": str(value)}
