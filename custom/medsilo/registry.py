"""List the names that plans and commands may use: methods, tasks, networks and other objects of medsilo and of
plug-ins.

This module lists the names of medsilo's engine as "module:Class", and imports a class on first use. A plug-in's names
come from the entry points in its package's metadata, so that a plug-in is imported only when it is used. Some plug-ins
belong to distributions of medsilo itself.
"""

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Any

from medsilo.core.errors import PlanError
from medsilo.core.own_code import uncalled
from medsilo.core.package import ENGINE as OWN
from medsilo.core.package import (
    OURS,
    attach_again,
    canonical,
    extra_with,
    facts_of,
    files_in,
    files_of,
    from_lab,
    in_words,
    is_installed,
    place_in_package,
)
from medsilo.core.text import is_safe_name

ANY = ("*",)  # allows every installed package; for one person who runs everything on one machine
SOURCE = "source-of-"  # prefix of the package name in a plan for a class that no package defines


class PluginTable(Mapping[str, Any]):
    """A table of objects by name; each object is imported on first use, so that listing names imports no module."""

    def __init__(self, group: str, base: str, builtin: Mapping[str, str]) -> None:
        """Create a table of medsilo's own objects and of the objects in a group of entry points.

        Args:
            base: the base class of all objects, as "module:Class"
            builtin: the objects of medsilo's engine by name, as "module:Class"
        """
        self.group, self.base, self.builtin = group, base, dict(builtin)

    def __iter__(self) -> Iterator[str]:
        others = {name: self._packages(name) == [OWN] for name in sorted(self._entries().keys() - self.builtin.keys())}
        own = [*self.builtin, *(name for name in others if others[name])]
        yield from sorted(own) if list(self.builtin) == sorted(self.builtin) else own
        yield from (name for name in others if not others[name])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def ours(self) -> list[str]:
        """Return the names that are defined by medsilo's engine, or by packages that are distributed with the
        engine.
        """
        return [name for name in self if self._packages(name) == [OWN]]

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._entries()

    def __getitem__(self, name: str) -> Any:
        package = self.package_of(name)
        if name in self.builtin:
            return _imported(self.builtin[name])
        if name not in self._entries():
            raise KeyError(name)
        return self._load(name, package or OWN)

    def remedy(self, name: object) -> str:
        """For an unknown name, return advice that lists the valid names to use instead."""
        if waits := attach_again(self.group, str(name)):
            return waits
        if not len(self):
            return "no installed package defines such a name"
        near = get_close_matches(str(name).lower(), self, n=1, cutoff=0.8)
        if near:
            return f"did you mean {near[0]!r}? ('medsilo list' shows all)"
        return f"choose one of {', '.join(map(repr, self))}{from_lab('names for researchers')}"

    def package_of(self, name: str) -> str | None:
        """Return the installed package that defines a name, or None for medsilo's packages. If two packages define the
        same name, the method raises PlanError.
        """
        packages = self._packages(name)
        if len(packages) > 1:
            raise PlanError(
                f"{name!r} is in two packages, {' and '.join(packages)}; rename it in {packages[-1]}, or uninstall "
                "one of the two packages"
            )
        return packages[0] if packages and packages != [OWN] else None

    def code_of(self, name: str) -> str:
        """Return the import name of the package with the code of the named class; the package may belong to medsilo or
        to a plug-in.
        """
        return self.package_of(name) or self.place_of(name).partition(".")[0]

    def place_of(self, name: str) -> str:
        """Return the module and the class of a name as "module:Class"; medsilo itself must define the name."""
        return self.builtin.get(name) or self._entries()[name][OWN].value

    def written_in(self, name: str) -> str:
        """Return "module:Class" of a name, or an empty string if no source file defines the name or several packages
        define it.
        """
        own = {OWN: self.builtin[name]} if name in self.builtin else {}
        entries = {package: entry.value for package, entry in self._entries().get(name, {}).items()}
        places = [*{**entries, **own}.values()]
        return places[0] if len(places) == 1 else ""

    def _packages(self, name: str) -> list[str]:
        """Return the packages that define a name; medsilo comes first."""
        own = [OWN] if name in self.builtin else []
        return list(dict.fromkeys([*own, *sorted(self._entries().get(name, ()), key=lambda package: package != OWN)]))

    def _entries(self) -> Mapping[str, Mapping[str, EntryPoint]]:
        return _entries(self.group, tuple(sys.path))

    def _load(self, name: str, package: str) -> Any:
        entry = self._entries()[name][package]
        if not is_safe_name(name):
            raise PlanError(f"package {package}: the name {name!r} has odd characters; use letters, digits, '-'")
        try:
            found = entry.load()
        except Exception as error:
            module = error.name if isinstance(error, ModuleNotFoundError) else None
            why = f"the module {module} is missing" if module else type(error).__name__
            needed = (extra_with(module) if module else None) or "the version made for this medsilo"
            told = f"package {package}: {name!r} can't be loaded ({why}); install {needed}"
            raise PlanError(told, private=str(error)) from error
        self._check(found, name, package)
        file = Path(sys.modules[entry.module].__file__ or "").resolve()
        # medsilo's own modules are checked separately, because medsilo's distributions may be installed in different
        # folders
        if package == OWN:
            own = place_in_package(str(file)) or (entry.dist is not None and file in files_in(entry.dist))
        else:
            own = file in map(Path.resolve, files_of(package).values())
        if not own:
            told = "is imported from elsewhere; remove other copies of its modules"
            raise PlanError(f"package {package}: {name!r} {told}")
        return found

    def _check(self, plugin: Any, name: str, package: str) -> None:
        base, kind = _imported(self.base), plugin if isinstance(plugin, type) else type(plugin)
        if not issubclass(kind, base):
            raise PlanError(f"package {package}: {name!r} must be a {base.__name__}; derive it from {self.base}")


class Registry(PluginTable):
    """A table of the classes of a plan's sections, by name.

    A program or notebook may register additional classes, which are known only in the process of this program or
    notebook.
    """

    def __init__(self, group: str, base: str, builtin: Mapping[str, str]) -> None:
        super().__init__(group, base, builtin)
        # for each name, the class, and the hash of the class's source code
        self._given: dict[str, tuple[type, str]] = {}

    def give(self, plugin: Any, source: str) -> None:
        """Register a class for this process under the class's name; a class that is registered later replaces a class
        of equal name.

        Args:
            source: a hash of the class's source
        """
        name = plugin.model_fields["name"].default
        if name in self and name not in self._given:
            raise PlanError(f"{plugin.__name__}: the name {name!r} is already in use; choose another name")
        self._check(plugin, name, plugin.__module__)
        self._given[name] = plugin, source

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._given

    def __contains__(self, name: object) -> bool:
        return name in self._given or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        return self._given[name][0] if name in self._given else super().__getitem__(name)

    def package_of(self, name: str) -> str | None:
        return SOURCE + name if name in self._given else super().package_of(name)

    def facts_of(self, name: str, package: str) -> dict[str, str]:
        return {"version": "source", "hash": self._given[name][1]} if name in self._given else facts_of(package)

    def spelled(self, name: object) -> str | None:
        """Return the name in this table's spelling, regardless of upper and lower case, or None if the table lacks the
        name.
        """
        if not isinstance(name, str) or name in self:
            return name if isinstance(name, str) else None
        return next((known for known in self if known.lower() == name.lower()), None)

    def read(self, values: Any) -> Any:
        """Return the plan's section as an object of the named class, or raise pydantic's validation error."""
        from pydantic_core import PydanticCustomError

        from medsilo.core.section import Section

        if isinstance(values, Section):
            return values
        if not isinstance(values, Mapping) or "name" not in values:
            raise PydanticCustomError("name_missing", "it has no name")
        name = self.spelled(values["name"])
        if name is None or name not in self:
            told = {"name": values["name"], "remedy": self.remedy(values["name"])}
            raise PydanticCustomError("name_not_known", "{name} is not known", told)
        # the section is validated as strict JSON, as all plans are
        text = json.dumps({**values, "name": name}, default=str)
        return self[name].model_validate_json(text, strict=True)

    def named_in(self, section: Any) -> str:
        """Return the name in a plan's raw section, in this table's spelling, or an empty string if the section has no
        name.
        """
        name = section.get("name") if isinstance(section, Mapping) else None
        return self.spelled(name) or (name if isinstance(name, str) else "")

    def _check(self, plugin: Any, name: str, package: str) -> None:
        from medsilo.core.section import Section

        base = _imported(self.base)
        if not (isinstance(plugin, type) and issubclass(plugin, Section) and issubclass(plugin, base)):
            raise PlanError(f"package {package}: {name!r} is not a {base.__name__}; derive it from {self.base}")
        if plugin.model_fields["name"].default != name:
            raise PlanError(f'package {package}: {name!r} has another name; write name: Literal["{name}"] = "{name}"')
        if package != OWN and (odd := min(uncalled(plugin), default="")):
            near = get_close_matches(odd, [hook for hook in vars(base) if not hook.startswith("_")], n=1)
            remedy = f"did you mean {near[0]}?" if near else f"{base.__name__} has no such method."
            told = f"{plugin.__name__} defines {odd}, which nobody calls; {remedy} A helper's name begins with _"
            raise PlanError(f"package {package}: {name!r}: {told}")


@cache
def _installed(path: tuple[str, ...]) -> Any:
    """Return the entry points of all groups at once, because even reading a single group reads the metadata of all
    installed packages.
    """
    return entry_points()


@cache
def _entries(group: str, path: tuple[str, ...]) -> Mapping[str, Mapping[str, EntryPoint]]:
    """Return the entry points of a group by name and package; all packages of medsilo count as one package.

    The entry points are cached; if Python's module search path changes, they are read again.
    """
    found: dict[str, dict[str, EntryPoint]] = {}
    # the name is cached, because each reading of a name parses the distribution's METADATA file
    name_of = cache(attrgetter("name"))
    for entry in _installed(path).select(group=group):
        if entry.dist:
            package = canonical(name_of(entry.dist))
            found.setdefault(entry.name, {})[OWN if package in OURS else package] = entry
    return found


def _imported(path: str) -> type[Any]:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


METHODS = Registry(
    "medsilo.methods",
    "medsilo.schedule.algorithm:Algorithm",
    {
        "local": "medsilo.methods.local:Local",
        "fedavg": "medsilo.methods.fedavg:FedAvg",
        "fedprox": "medsilo.methods.fedprox:FedProx",
        "fedbn": "medsilo.methods.fedbn:FedBN",
        "fedper": "medsilo.methods.fedper:FedPer",
        "fednova": "medsilo.methods.fednova:FedNova",
        "fedavgm": "medsilo.methods.fedopt:FedAvgM",
        "fedadam": "medsilo.methods.fedopt:FedAdam",
        "fedyogi": "medsilo.methods.fedopt:FedYogi",
        "fedadagrad": "medsilo.methods.fedopt:FedAdagrad",
        "scaffold": "medsilo.methods.scaffold:Scaffold",
        "moon": "medsilo.methods.moon:Moon",
        "ditto": "medsilo.methods.ditto:Ditto",
        "apfl": "medsilo.methods.apfl:APFL",
        "per-fedavg": "medsilo.methods.per_fedavg:PerFedAvg",
        "pfedme": "medsilo.methods.pfedme:PFedMe",
        "fine-tuning": "medsilo.methods.fine_tuning:FineTuning",
        "harmofl": "medsilo.methods.harmofl:HarmoFL",
        "adafed": "medsilo.methods.adafed:AdaFed",
        "d-adafed": "medsilo.methods.adafed:DAdaFed",
        "f-adafed": "medsilo.methods.f_adafed:FAdaFed",
        "fedsm": "medsilo.methods.fedsm:FedSM",
        "fedsm-extra": "medsilo.methods.fedsm_extra:FedSMExtra",
        "fedsm-ensemble": "medsilo.methods.fedsm_extra:FedSMEnsemble",
        "central": "medsilo.methods.central:Central",
    },
)

TASKS = Registry(
    "medsilo.tasks",
    "medsilo.tasks.task:Task",
    {
        "image-folder": "medsilo.tasks.own.image_folder:ImageFolder",
        "nifti-folder": "medsilo.tasks.own.volume_folder:NiftiFolder",
        "synthetic-activity": "medsilo.tasks.synthetic.activity:SyntheticActivity",
        "synthetic-histology": "medsilo.tasks.synthetic.histology:SyntheticHistology",
        "synthetic-prostate": "medsilo.tasks.synthetic.prostate:SyntheticProstate",
        "table": "medsilo.tasks.own.patient_table:PatientTable",
    },
)

NETWORKS = Registry(
    "medsilo.networks",
    "medsilo.models.network:Network",
    {
        "activity-cnn": "medsilo.models.architectures:ActivityCnn",
        "densenet121": "medsilo.models.architectures:DenseNet121",
        "linear": "medsilo.models.architectures:Linear",
        "mlp": "medsilo.models.architectures:Mlp",
        "small-cnn": "medsilo.models.architectures:SmallCnn",
        "unet": "medsilo.models.architectures:UNet",
        "vgg11": "medsilo.models.architectures:Vgg11",
    },
)

# Layers that a plan names; a plan does not name the layers of federation/site_stack.py and server_stack.py, which are
# always present.
LAYERS = Registry("medsilo.layers", "medsilo.schedule.layer:Layer", {"canary": "medsilo.check.canary:Canary"})

# Protocols of secure aggregation, by their names in plans.
AGGREGATIONS = Registry("medsilo.aggregations", "medsilo.schedule.sealing:SecureAggregation", {})

# tables of classes by section of the plan
TABLES: Mapping[str, Registry] = {"algorithm": METHODS, "task": TASKS, "network": NETWORKS}


def table_of(key: str) -> Registry:
    """Return the table of classes from which a section of the plan chooses a class by name."""
    section = key.partition(".")[0]
    return AGGREGATIONS if section == "secure_aggregation" else TABLES.get(section, LAYERS)


def check_packages(names: Mapping[str, str], packages: Any, allowed: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the version and hash of every package, other than medsilo, that defines a name in a plan; no package is
    imported.

    Raises PlanError for a package that is not allowed, not installed, or different from the package in the plan.

    Args:
        names: the names by key of the plan; the key of a layer has an index (`layers.0`)
        packages: the plan's `packages`
    """
    said = {canonical(str(name)): facts for name, facts in packages.items()} if isinstance(packages, dict) else {}
    found = {}
    for key, name in names.items():
        table = table_of(key)
        if package := table.package_of(name):
            check_allowed(package, allowed)
            found[package] = table.facts_of(name, package)
            _check_same(package, found[package], said.get(package, found[package]))
        elif name and name not in table and (absent := next(filterfalse(is_installed, said), None)):
            told = f"package {absent} of this plan is not installed here; install {in_words(said[absent])}"
            if absent.startswith(SOURCE):
                told = "it was a class of a Python program; define it there again, or make a package of it "
                told += "(python -m medsilo_lab.new)"
            raise PlanError(f"{key}.name: {name!r} is not known: {told}")
    return dict(sorted(found.items()))


def check_allowed(package: str, allowed: Collection[str]) -> None:
    """Raise PlanError for a package that is not among the allowed packages."""
    if "*" not in allowed and package not in map(canonical, allowed):
        raise PlanError(
            f"this site does not allow package {package} of the plan; review it and name it under 'packages' in "
            f"medsilo.yaml, or use another plan"
        )


def _check_same(package: str, own: Mapping[str, str], said: Any) -> None:
    if isinstance(said, dict) and said != own:
        raise PlanError(
            f"packages.{package}: {in_words(own)} is installed here, but the plan needs {in_words(said)}; install "
            "that here, or remove 'packages' from the plan"
        )
