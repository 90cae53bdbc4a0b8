"""Write the tables of the documentation from descriptions in the code of the packages.

    python -m tools.tables        # write the tables of all pages

A table is between `<!-- table: name -->` and `<!-- end -->`; people write all other text of a page. Generated numbers
within sentences have the same marks.
"""

import inspect
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from medsilo import check, extend
from medsilo.cli import _program, all_commands
from medsilo.core import model_folders
from medsilo.core.section import Section
from medsilo.extend import methods as extend_methods
from medsilo.extend import networks as extend_networks
from medsilo.federation.private_site import WHAT
from medsilo.learning.training import Training
from medsilo.mixing import rules
from medsilo.mixing.robust import AggregationSettings, RobustRule
from medsilo.models.network import Network
from medsilo.plan import ModelSelection, Plan, SecureAggregationSettings, StudyDescription, TransportSettings
from medsilo.registry import NETWORKS, TASKS
from medsilo.runs import own_files, paths, rounds, schema, score, site_files
from medsilo.schedule.declared import PrivacyOffer
from medsilo.schedule.participation import Participation
from medsilo.site.airlock_settings import BorderSettings, RoomSettings
from medsilo.site.settings import PrivacyRequirements, SiteSettings
from medsilo.tasks.image_formats import FORMATS
from medsilo_lab import extend as extend_lab
from medsilo_lab.study import subgroup_tables, verdict_file
from medsilo_nnunet.nnunet_network import Architecture, NnUNetPlans
from nvflare_reliability.timeouts import Timeouts, limits
from tools import evidence, methods
from tools.markdown import table

ROOT = Path(__file__).resolve().parents[1]
APPROVAL = ("approval", "takes_part")
AIRLOCK = ("airlock",)
PROTECTION = (
    "public_data",
    "min_patients_per_metric",
    "answers",
    "state_dir",
    "studies",
    "memory_limit",
)
COMMANDS = {  # a page for each group of commands in `medsilo --help`
    "begin": "To begin with",
    "one-machine": "With all data on one machine",
    "lead": "For a consortium's lead",
    "runs": "Of finished runs",
    "hospital": "For a hospital's engineer",
    "lists": "Lists and documentation",
}
WIDEST = 88  # maximum number of characters in a line of a shell command
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n?).*?(<!-- end -->)", re.DOTALL)
ROBUST = {
    rule.model_fields["name"].default: rule
    for rule in (rules.NormBound, rules.Median, rules.TrimmedMean, rules.MultiKrum)
}
ELSEWHERE = (NnUNetPlans, Architecture, Network)
REST = ("seed", "protocol", "packages")  # keys of the plan that are not sections
# maximum number of names in a table cell; if more classes have a key, the cell names the classes that lack the key
MOST_NAMES = 6


# ---------------------------------------------------------------------------------------------------- in words
def values_of(field: FieldInfo) -> str:
    """Return the allowed values of a key, with the default value in brackets."""
    choices = [choice for kind in kinds_of(field.annotation) for choice in choices_of(kind)]
    default = default_of(field)
    if choices:
        nothing = ["(null)"] if default == "null" else []
        return " ".join([*nothing, *(f"(`{choice}`)" if choice == default else f"`{choice}`" for choice in choices)])
    if any(is_section(kind) for kind in kinds_of(field.annotation)):
        return f"a section ({default})" if default == "null" else "a section"
    return f"{bounds_of(field)} ({default})".strip() if default else bounds_of(field)


def kinds_of(annotation: Any) -> list[Any]:
    """Return the classes that a key's type allows: the members of a union, the classes among which the key name
    chooses, or the type itself.
    """
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in kinds_of(member)]
    if hasattr(annotation, "__metadata__"):
        return kinds_of(get_args(annotation)[0])
    return [*ROBUST.values()] if annotation is RobustRule else [annotation]


def choices_of(kind: Any) -> list[str]:
    """Return the allowed values of a literal or boolean type."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return ["false", "true"] if kind is bool else []


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def default_of(field: FieldInfo) -> str:
    """Return the default value of a key in words, or an empty text if the plan must set the key."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | int):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, tuple | dict):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def bounds_of(field: FieldInfo) -> str:
    limits = {
        name: getattr(rule, name)
        for rule in field.metadata
        for name in ("ge", "gt", "le", "lt", "multiple_of")
        if getattr(rule, name, None) is not None
    }
    marks = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    words = [f"{marks[name]} {amount(limits[name])}" for name in marks if name in limits]
    if "multiple_of" in limits:
        words.append(f"a multiple of {limits['multiple_of']}")
    return ", ".join(words)


def amount(value: float) -> str:
    """Return a number as people write it, with spaces between thousands."""
    return f"{value:,.0f}".replace(",", " ") if float(value).is_integer() else f"{value:g}"


def described(model: type[BaseModel], name: str) -> str:
    """Return the description of a field, from a base class if the class itself has no description."""
    for kind in model.__mro__:
        field = getattr(kind, "__pydantic_fields__", {}).get(name)
        if field is not None and field.description:
            return field.description
    raise ValueError(f"{model.__module__}.{model.__name__}.{name} has no description")


# ---------------------------------------------------------------------------------------------------- the plan
def keys_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield three texts for each field, including the fields of nested sections: key, allowed values and meaning."""
    for name, field in model.model_fields.items():
        if name in ("name", "kind") and len(choices_of(field.annotation)) == 1:
            continue
        if field.annotation is type(None):
            continue
        key = f"{prefix}.{name}" if prefix else name
        inner = [kind for kind in kinds_of(field.annotation) if is_section(kind)]
        tag = next((name for name in ("name", "kind") if all(name in kind.model_fields for kind in inner)), "")
        if len(inner) > 1 and tag:
            names = [str(kind.model_fields[tag].default) for kind in inner]
            chosen = getattr(field.default, tag, None)
            values = " ".join(f"(`{name}`)" if name == chosen else f"`{name}`" for name in names)
            yield f"{key}.{tag}", f"(null) {values}" if field.default is None else values, described(model, name)
            continue
        yield key, values_of(field), described(model, name)
        if len(inner) == 1 and inner[0] not in ELSEWHERE:
            yield from keys_of(inner[0], key)


def section(model: type[BaseModel], prefix: str) -> str:
    rows = [(anchored(key), *rest) for key, *rest in keys_of(model, prefix)]
    return table(("key", "values (default)", "meaning"), rows)


def anchored(key: str, anchor: str = "") -> str:
    return f'`{key}`<a name="{anchor or key}"></a>'


def one_of(models: Mapping[str, type[BaseModel]], prefix: str, what: str) -> str:
    """Return a table of the keys of a section whose key name chooses one of several classes.

    A key that has the same meaning in several classes has only one row.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, model in models.items():
        for key, values, meaning in keys_of(model, prefix):
            found[key, meaning][values].append(name)
    rows = [(anchored(f"{prefix}.name"), " ".join(f"`{name}`" for name in models), f"the {what}", "")]
    seen: set[str] = set()
    for (key, meaning), variants in found.items():
        usual, *others = sorted(variants, key=lambda values: -len(variants[values]))
        words = [usual, *(f"{', '.join(variants[values])}: {values}" for values in others)]
        having = [name for name in models if any(name in names for names in variants.values())]
        # if the key already has a row with another meaning, the anchor also contains the name of a class
        anchor = f"{key}-{having[0]}" if key in seen else key
        seen.add(key)
        rows.append((anchored(key, anchor), "; ".join(words), meaning, named(having, list(models))))
    return table(("key", "values (default)", "meaning", f"{what}s"), rows)


def named(having: Sequence[str], among: Sequence[str]) -> str:
    """Return the names of the classes that have a key, or "all but" the names of the classes that lack the key."""
    lacking = [name for name in among if name not in having]
    if not lacking:
        return "all"
    return f"all but {', '.join(lacking)}" if len(having) > MOST_NAMES > len(lacking) else ", ".join(having)


def top_level() -> str:
    rows = [(anchored(name), values_of(Plan.model_fields[name]), described(Plan, name)) for name in REST]
    return table(("key", "values (default)", "meaning"), rows)


def settings(names: Sequence[str]) -> str:
    chosen = [(name, SiteSettings.model_fields[name]) for name in names]
    return table(
        ("key", "values (default)", "meaning"),
        [(anchored(name), values_of(field), described(SiteSettings, name)) for name, field in chosen],
    )


# ---------------------------------------------------------------------------------------------------- the run tree
def fields(model: type[BaseModel], prefix: str = "") -> str:
    return table(
        ("key", "meaning"),
        [(f"`{prefix}{field.alias or name}`", described(model, name)) for name, field in model.model_fields.items()],
    )


# The files of a site, which are in the folder of the run or in a folder of the site.
SITE_TREE: Mapping[str, str] = {
    paths.PLAN: "a copy of the resolved plan, with which the hospital can use its model without the server's files",
    paths.PROVENANCE: "the versions, plan and seed that produced the site's numbers (as in the run's "
    "`provenance.json`), and also the device and the numerical precision of training. The file never leaves "
    "the site",
    paths.METRICS: "the site's numbers, one line per round",
    paths.BEST: "the site's model after its best round",
    paths.LAST: "the site's model after the last round",
    paths.STATE_FILES: "the private state from which the site can resume, one file per round: the last rounds, "
    "and every tenth of all earlier rounds",
    paths.SEALING: "with secure aggregation: the site's keys and secret, and the names of the sites in each sum that "
    "this site helped to unmask. The file never leaves the site",
    paths.SEALED: "with secure aggregation: the site's masked message of the last round, which the site repeats if "
    "the message is lost. Without the site's keys, the masked message is noise",
    paths.ANSWER_FILES: "in a study with an entry in the site's privacy ledger: the site's last answers. If the "
    "server asks twice, the site sends the same stored answer twice, so the second time has no privacy cost",
    paths.NOISY_COUNTS: "if the site sends numbers of cases with noise: the noisy numbers, whose noise is sampled "
    "only once",
    paths.SPENT: "in a study with an entry in the privacy ledger: the privacy cost (ε at δ) of this study and of "
    "all studies. The hospital's own report shows the cost of this study and of all studies. The "
    "file never leaves the site",
    paths.WEIGHT: "for patients' data: weight of the site's updates, number of training patients, "
    "number of training cases, each as an exact and a disclosed number. The hospital's own "
    "report shows the weight of the "
    "site's updates. The file never leaves the site",
    paths.SUBGROUPS: "for each patient in a subgroup: the subgroup, the level, and the patient's number in test.csv. "
    "The patient's number is empty if the level's score stays at the site. The file never leaves the "
    "site",
    paths.CASES: "the scores of each test case. Cases and patients are numbered in the order of the data. A "
    "cell is empty if a case has no value in this column. The file never leaves the site",
    paths.ERRORS: "the full text of errors. The file never leaves the site",
    paths.WORKER_LOG: "the output of the training process. The file never leaves the site",
    paths.NOW: "while the site works on an answer: the site's present work, and the share of its training that is "
    "done. The file never leaves the site",
    paths.DIARY: "under NVFlare: a line for each answer that left the site, and a line with the reason for each "
    "answer that was not sent. The file never leaves the site",
    paths.DATA: "for tasks that read a folder: what medsilo found among the site's files, and the names of the "
    "files that it left out. The file never leaves the site",
    paths.EMBEDDINGS.format(
        "..."
    ): "with the network `frozen`: the embedding of each image, by the image's hash. If the site sets the key "
    "`data.cache_folder`, the file is in that folder. The file never leaves the site",
    f"{paths.PICTURES}/": "images before and after HarmoFL's normalisation, and the best, median and worst test case "
    "with the structures that the model found. The folder `pictures/` has only pictures of synthetic "
    "images, unless the site's `pictures` is true",
}

RUN_TREE: Mapping[str, str] = {
    paths.PLAN: "the resolved plan: every key with its value",
    paths.PROVENANCE: "package version and hash, plan hash, seed, protocol, versions of libraries, platform",
    paths.JOBS: "ids of the NVFlare jobs that led the study, from the first job to the last",
    paths.LOCK: "an empty file, which the NVFlare job that leads the study locks",
    paths.LEAD: "the NVFlare name of the lead who submitted the study; only this lead can continue the study (not in "
    "a simulation)",
    paths.ROUNDS: "one line per round",
    paths.SUMMARY: "the outcome, success or failure",
    paths.NOW: "while the study runs: which sites the server has asked, and which have answered",
    paths.REPORT: "the page (`medsilo report`)",
    f"{paths.CHECKPOINTS}/{paths.ROUND_FILES}": "the server's state after the last round; "
    "the file's name has the round's index",
    f"{paths.CHECKPOINTS}/{paths.BEST_FILES}": "the server's state after the best round so far",
    f"{paths.GLOBAL}/{paths.BEST}": "the model that all sites share, after the best round; absent if every site has "
    "its own model",
    f"{paths.GLOBAL}/{paths.LAST}": "the model that all sites share, after the last round; if each site chooses "
    "its own best round, there is no `global/best.safetensors`",
    f"{paths.SUPER_MODEL}/": "FedSM's super model: the global model, the selector and the personal models of sites "
    "that agreed. The file `supermodel.json` has the threshold γ of the selector, and the SHA-256 of each file; "
    "`plan.yaml` is the plan. Each site's folder has the site's own super model",
    f"{model_folders.FOLDER}/": "files with initial weights of the plan's network; the name of each file is the "
    "file's SHA-256",
    **{f"{paths.SITES}/<site>/{name}": content for name, content in SITE_TREE.items()},
    f"{paths.TENSORBOARD}/<site>/": "event files with the site's scores and losses (with `--tensorboard`)",
    f"{paths.JOB}/": "the submitted job (simulator only)",
    f"{paths.NVFLARE}/": "NVFlare's workspace (simulator only)",
    paths.NVFLARE_LOG: "NVFlare's log (simulator only)",
}

STUDY_TREE: Mapping[str, str] = {
    "<row>-<seed>/": "one run's folder for each row and seed",
    paths.COMPARISON: "the sites' settings, which must be the same for all runs in the comparison's folder",
    paths.VERDICT: "scores, differences and intervals of the finished runs",
    paths.REPORT: "the page about all runs of the comparison",
    f"{paths.HOSPITALS}/<site>.html": "a decision sheet for one hospital, on one printed "
    "page (`medsilo report --hospitals`)",
    f"{paths.LOCKS}/": "empty files; the comparison and each of its runs keep a lock on one of these files "
    "until they end",
}


def tree(entries: Mapping[str, str]) -> str:
    return table(("file", "content"), [(f"`{name}`", content) for name, content in entries.items()])


# ---------------------------------------------------------------------------------------------------- the commands
# descriptions of type aliases, which cannot have docstrings
ALIASES = {
    "BY_ITSELF": "A protocol's condition that the plan uses neither amplitude normalisation nor weight perturbation.",
    "Dimensions": "The key `dimensions` of a network: 2 or 3.",
    "Lesson": "How networks learn from a batch of the training data.",
    "Modules": "A site's networks by name.",
    "NETWORKS": "The networks by name; the method `read` makes a network from a section of a plan.",
    "Ranges": "The smallest and the largest allowed value of each tensor in a group of tensors.",
    "Shares": "A number for each site or tensor, by name.",
    "Tensors": "Tensors by name.",
    "Weighting": "How sites are weighted in a mean: by their numbers of samples, or equally.",
}
LIMITS: Mapping[str, tuple[float, Callable[[Timeouts], float], str]] = {
    "tensor_download_chunk_size": (
        2 << 20,
        lambda own: limits(own, "site")["tensor_download_chunk_size"],
        "number of bytes in one chunk of tensors: 1 MiB, or less if a connection with the speed "
        "`transport.slowest` cannot send 1 MiB in ten seconds",
    ),
    "tensor_streaming_per_request_timeout": (
        600,
        lambda own: own.again,
        "seconds that a receiver waits for a chunk before the receiver asks whether the chunk was lost; on "
        "a fast connection, the receiver asks earlier. Without medsilo, NVFlare's receiver asks only four "
        "times, and never after the connection broke",
    ),
    "get_task_timeout": (
        300,
        lambda own: 2 * own.again,
        "seconds until a site repeats its request for work if no reply arrives",
    ),
    "submit_task_result_timeout": (
        300,
        lambda own: own.silence,
        "seconds that a site waits for the server to fetch the next chunk of the site's answer; after the last "
        "chunk, the limit `get_task_timeout` applies",
    ),
    "streaming_idle_timeout": (
        600,
        lambda own: limits(own, "site")["streaming_idle_timeout"],
        "seconds that a sender keeps tensors for a receiver that does not ask for the next chunk",
    ),
    "max_runner_sync_timeout": (
        60,
        lambda own: limits(own, "site")["max_runner_sync_timeout"],
        "seconds within which a job's process at a site must reach the job's process at the server",
    ),
    "dead_client_grace_period": (
        60,
        lambda own: limits(own, "server")["dead_client_grace_period"],
        "seconds until NVFlare ends a job that needs a dead site; NVFlare treats a site as dead after 600 seconds "
        "without a message",
    ),
}


def image_formats() -> str:
    rows = [
        (
            one.name,
            " ".join(f"`{suffix}`" for suffix in one.suffixes) or "any or none",
            "volumes" if one.volumes else "flat images",
            " ".join(f"`{suffix}`" for suffix in one.masks or FORMATS[0].masks[:1]),
        )
        for one in FORMATS
    ]
    return table(("format", "suffixes", "usual content", "suffixes of masks"), rows)


def lines() -> str:
    """Return a table of limits for messages: NVFlare's defaults, and medsilo's values with the default timeouts and
    with the longest timeouts.
    """
    plans = [Timeouts(silence=420), Timeouts(silence=3600, rate=8000)]
    rows = [
        f"| `{key}` | {default:,.0f} | {' | '.join(f'{ours(plan):,.0f}' for plan in plans)} | {meaning} |"
        for key, (default, ours, meaning) in LIMITS.items()
    ]
    head = "| limit | NVFlare's own | the defaults | an hour, 64 kbit/s | meaning |\n|---|---|---|---|---|"
    return "\n".join([head, *rows, ""])


def commands(people: str) -> str:
    """Return the reference for one group of commands in `medsilo --help`: each command with its arguments and
    options.
    """
    parts = []
    for own in all_commands()[people]:
        command, ctx = parsed(own.name)
        about = inspect.cleandoc(command.help or "").split("\n\n")
        usage = " ".join(["medsilo", own.name, *command.collect_usage_pieces(ctx)])
        rows = [*options_of(own.name, command, ctx)]
        example = f"medsilo {own.name} {own.example}".rstrip()
        parts += [
            f"## medsilo {own.name}",
            *(" ".join(part.split()) for part in about),
            f"`{usage}`",
            table(("argument or option", "meaning"), rows).rstrip(),
            f"```\n{wrapped(example)}\n```",
        ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def command_pages() -> str:
    """Return the names of all commands by page; of a group such as `kits make`, only the first word."""
    rows = []
    for page, people in COMMANDS.items():
        file = f"commands/{page}.md"
        title = (ROOT / "docs/reference" / file).read_text("utf-8").partition("\n")[0].removeprefix("# ")
        words = dict.fromkeys(own.name.partition(" ")[0] for own in all_commands()[people])
        rows.append((" ".join(f"`{word}`" for word in words), f"[{title}]({file})"))
    return table(("commands", "page"), rows)


def parsed(name: str) -> tuple[Any, Any]:
    command, ctx = _program(), None
    for word in ["medsilo", *name.split()]:
        command = command if ctx is None else command.commands[word]
        ctx = command.context_class(command, info_name=word, parent=ctx)
    return command, ctx


def options_of(name: str, command: Any, ctx: Any) -> Iterator[tuple[str, str]]:
    """Yield each argument and option of a command with its help text and its anchor, such as run--set.

    All commands have --help and --json, so the documentation describes these two options only once.
    """
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record and not {"--help", "--json"} & {*param.opts}:
            own = max(param.opts, key=len)
            meaning = re.sub(r"([^\s,;()]*<\w+>[^\s,;()]*)", r"`\1`", " ".join(record[1].split()))
            yield anchored(record[0], f"{name.replace(' ', '-')}-{own.removeprefix('-')}"), meaning


def wrapped(line: str) -> str:
    """Break a command into lines of at most 88 characters; a shell reads these lines as one command."""
    lines = [""]
    for word in shlex.split(line, posix=False):
        if lines[-1] and len(lines[-1]) + len(word) > WIDEST - 4:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return "\n".join(lines)


def checks() -> dict[str, str]:
    """Return the descriptions of the checks of `medsilo check` by topic, from the modules of `medsilo.check`."""
    told = defaultdict[str, list[str]](list)
    for module in iter_modules(check.__path__, f"{check.__name__}."):
        for topic, text in getattr(import_module(module.name), "CHECKS", {}).items():
            told[topic].append(text)
    return {topic: ". ".join(texts) for topic, texts in sorted(told.items())}


def privacy_costs() -> str:
    """Return a table of the numbers that leave a hospital, and the privacy cost of each number."""
    stays = "stays at the hospital"
    scores = "only the score leaves the hospital, with `privacy.scores: {epsilon: 0.5}`"
    noisy = {"counts": "`privacy.counts: {epsilon: 0.2}`, with noise sampled once", "train": "–"}
    rows = [
        (
            what,
            "rounded, 0",
            noisy.get(told, scores),
            "the hospital does not join the study" if told == "counts" else stays,
        )
        for told, what in WHAT.items()
    ]
    means = "`privacy.statistics: {epsilon: 0.5}`, once"
    rows.append(("a method's statistics (AdaFed, FedRDN, HarmoFL)", "–", means, "medsilo rejects the plan"))
    costs = ("cost if the hospital declares the numbers public", "cost if the plan adds noise", "otherwise")
    return table(("numbers", *costs), rows)


def extension(place: ModuleType) -> str:
    """Return a table of the names that a module exports; each name has the first paragraph of its docstring."""
    own = {
        name: ALIASES.get(name) or inspect.getdoc(getattr(place, name)) or ""
        for name in sorted({*place.__all__} - {"__version__"})
    }
    first = {name: " ".join(told.partition("\n\n")[0].split()) for name, told in own.items()}
    rows = [f"| `{name}` | {told} |" for name, told in first.items()]
    return "\n".join(["| name | what it is |", "|---|---|", *rows, ""])


TABLES: Mapping[str, Callable[[], str]] = {
    "plan-algorithm": lambda: one_of(methods.OURS, "algorithm", "method"),
    "methods": methods.overview,
    "number-of-methods": methods.number,
    "private-methods": methods.private,
    "privacy-costs": privacy_costs,
    "families": methods.families,
    "families-of-readme": partial(methods.families, "docs/research/methods"),
    "families-of-site": partial(methods.families, "research/methods"),
    "headline": methods.headline,
    **{f"method-{name}": partial(methods.method, name) for name in methods.OURS},
    "plan-task": lambda: one_of(TASKS, "task", "task"),
    "plan-network": lambda: one_of(NETWORKS, "network", "network"),
    "plan-training": lambda: section(Training, "training"),
    "plan-participation": lambda: section(Participation, "participation"),
    "plan-aggregation": lambda: section(AggregationSettings, "aggregation"),
    "plan-robust": lambda: one_of(ROBUST, "aggregation.robust", "rule"),
    "plan-secure-aggregation": lambda: section(SecureAggregationSettings, "secure_aggregation"),
    "plan-study": lambda: section(StudyDescription, "study"),
    "plan-transport": lambda: section(TransportSettings, "transport"),
    "plan-model-selection": lambda: section(ModelSelection, "model_selection"),
    "plan-privacy": lambda: section(PrivacyOffer, "privacy"),
    "plan-rest": top_level,
    "image-formats": image_formats,
    "protection": lambda: settings(PROTECTION),
    "approval": lambda: settings(APPROVAL),
    "airlock": lambda: settings(AIRLOCK),
    "room": lambda: section(RoomSettings, "room"),
    "border": lambda: section(BorderSettings, "border"),
    "demands": lambda: section(PrivacyRequirements, "privacy"),
    "run-tree": lambda: tree(RUN_TREE),
    "summary": lambda: fields(schema.Summary),
    "agreed": lambda: fields(schema.Agreement, "agreed."),
    "selected": lambda: fields(schema.Selection, "selected."),
    "site": lambda: fields(schema.SiteResult, "sites.<site>."),
    "score": lambda: fields(score.Score, "scores.sites.<site>."),
    "decisions": lambda: fields(schema.Decisions, "sites.<site>.decisions."),
    "subgroup": lambda: fields(schema.SubgroupResult, "sites.<site>.subgroups[]."),
    "details": lambda: fields(schema.Details, "details."),
    "similarity": lambda: fields(schema.Similarity, "details.similarity."),
    "super-model": lambda: fields(schema.SuperModelFacts, "details.super_model."),
    "round": lambda: fields(rounds.Round),
    "site-round": lambda: fields(rounds.SiteRound, "sites.<site>."),
    "sent-update": lambda: fields(rounds.SentUpdate, "sites.<site>.updates.<group>."),
    "weighed": lambda: fields(own_files.Weighed),
    "provenance": lambda: fields(site_files.Provenance),
    "study-tree": lambda: tree(STUDY_TREE),
    "verdict": lambda: fields(verdict_file.Verdict),
    "warning": lambda: fields(verdict_file.Notice, "warnings[]."),
    "hospital": lambda: fields(verdict_file.HospitalVerdict, "hospitals.<site>."),
    "row": lambda: fields(verdict_file.VerdictRow, "rows[]."),
    "level": lambda: fields(verdict_file.Level),
    "difference": lambda: fields(verdict_file.PairedDifference),
    "subgroups": lambda: fields(subgroup_tables.SubgroupTable, "subgroups[]."),
    "subgroup-level": lambda: fields(subgroup_tables.SubgroupLevel, "subgroups[].levels[]."),
    "subgroup-pair": lambda: fields(subgroup_tables.SubgroupPair, "subgroups[].pairs[]."),
    "command-pages": command_pages,
    **{f"commands-{page}": partial(commands, people) for page, people in COMMANDS.items()},
    "checks": lambda: table(("where", "what is checked"), [*checks().items()]),
    "extend": lambda: extension(extend),
    "extend-lab": lambda: extension(extend_lab),
    "extend-methods": lambda: extension(extend_methods),
    "extend-networks": lambda: extension(extend_networks),
    "lines": lines,
    "evidence-scores": evidence.scores,
    "evidence-harmonisation": evidence.group("harmonisation"),
    "evidence-personalisation": evidence.group("personalisation"),
    "evidence-neither": evidence.group("neither", "ensemble", "chosen"),
    "evidence-weights": evidence.weights,
    "evidence-older": evidence.older,
    "evidence-told-twice": evidence.told_twice,
    "evidence-flamby": evidence.flamby,
    "evidence-reruns": evidence.reruns,
    "evidence-laboratories": evidence.laboratories,
    "evidence-intervals": evidence.intervals,
    "evidence-impact": evidence.impact,
    "evidence-impact-studies": evidence.impact_studies,
}


def renewed(page: str) -> str:
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


def pages() -> list[Path]:
    files = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    return [path for path in files if MARKED.search(path.read_text("utf-8"))]


def main() -> None:
    for path in pages():
        text = path.read_text("utf-8")
        if (new := renewed(text)) != text:
            path.write_text(new, "utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
