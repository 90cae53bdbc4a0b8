"""Every file and folder name of a run's folder and of a comparison's folder, with its meaning.

`docs/run-tree.md` is made from the two tables below: `python -m docs.tables`.
"""

from collections.abc import Mapping
from pathlib import Path

from medsilo.core.shelf import FOLDER

# ---------------------------------------------------------------------------------------------------- a run's folder
PLAN = "plan.yaml"
PROVENANCE = "provenance.json"
JOBS = "jobs.txt"
LOCK = "jobs.lock"
LEAD = "lead.txt"
ROUNDS = "rounds.jsonl"
SUMMARY = "summary.json"
NOW = "now.json"
REPORT = "report.html"
HOSPITALS = "hospitals"
CHECKPOINTS = "checkpoints"
GLOBAL = "global"
SUPER_MODEL = "supermodel"
FIGURES = "figures"
SITES = "sites"
JOB = "job"
NVFLARE = "nvflare"
NVFLARE_LOG = "nvflare.log"
REFUSED = "medsilo-refused.txt"  # in NVFlare's own run folder

# What is in the folders above.
BEST, LAST = "best.safetensors", "last.safetensors"
AMPLITUDE = "amplitude.png"
BEFORE = "before-a-hospital-came-*"  # a folder in the checkpoints
ROUND_FILES, BEST_FILES, STATE_FILES = "round-*.safetensors", "best-*.safetensors", "state-*.safetensors"
SEALING_FILES = "sealing-*.json"
SEALED, SUMS = "sealed.safetensors", "sealed-sums.json"
ANSWER_FILES = "answer-*.safetensors"
SPENT = "privacy.json"
LEDGER_HEADS = "ledger-heads.json"  # beside the studies, at the server: what hospitals' ledgers were last
NOISY_COUNTS = "counts.json"
METRICS = "metrics.csv"
CASES = "test.csv"
DATA = "data.json"
ERRORS = "errors.log"
WORKER_LOG = "worker.log"
WORKED = "worked.json"
DIARY = "diary.jsonl"
PICTURES = "pictures"

# What a hospital keeps beside its studies; no study can have a name that begins with this character.
HOSPITAL = "_hospital"
MODELS = "_models"  # of files that were sent to a hospital for its studies, beside these

# ---------------------------------------------------------------------------------------------------- a comparison's
VERDICT = "verdict.json"
LOCKS = ".locks"

RUN_TREE: Mapping[str, str] = {
    PLAN: "the resolved plan: every key with its value",
    PROVENANCE: "package version and hash, plan hash, seed, protocol, versions of libraries, platform",
    JOBS: "ids of the NVFlare jobs that led the study, the last one last",
    LOCK: "empty; held by the NVFlare job that leads the study",
    LEAD: "who submitted the study, as NVFlare knows them; only they can go on with it (not in a simulation)",
    ROUNDS: "one line per round",
    SUMMARY: "the outcome, success or failure",
    NOW: "while the study runs: which sites the server has asked, and which have answered",
    REPORT: "the page (`medsilo report`)",
    f"{CHECKPOINTS}/{ROUND_FILES}": "the server's state after the last round, named by its number",
    f"{CHECKPOINTS}/{BEST_FILES}": "the server's state after the best round so far",
    f"{CHECKPOINTS}/{BEFORE}/": "the same after the round before a hospital's first, where it came later than others: "
    "from there the study goes on without it (`medsilo leave`)",
    f"{GLOBAL}/{BEST}": "the model that all sites share, after the best round; absent where every site has its own",
    f"{GLOBAL}/{LAST}": "the same after the last round; the only one where sites choose a model of their own beside "
    "the shared one ([methods.md](methods.md#methods-with-a-model-of-the-hospitals-own))",
    f"{SUPER_MODEL}/": "FedSM: the global model, the personal models of sites that agreed and the selector as "
    "safetensors, `plan.yaml`, and `supermodel.json` with the threshold and every file's SHA-256. Each site "
    "has one of its own, too",
    f"{FOLDER}/": "files that the plan's network begins with, named by their SHA-256",
    f"{FIGURES}/{AMPLITUDE}": "the amplitude that all sites share (HarmoFL)",
    f"{SITES}/<site>/{PLAN}": "the resolved plan again, so that the hospital can use its model by itself",
    f"{SITES}/<site>/{METRICS}": "the site's numbers, one line per round",
    f"{SITES}/<site>/{BEST}": "the site's model after its best round",
    f"{SITES}/<site>/{LAST}": "the site's model after the last round",
    f"{SITES}/<site>/{STATE_FILES}": "the site's private state, for resuming",
    f"{SITES}/<site>/{SEALING_FILES}": "the site's keys of a sealed study, secret, one file for each time that it "
    "agreed on keys. It never leaves the site",
    f"{SITES}/<site>/{SEALED}": "of a sealed study: what the site sealed in the last round, to be sent again if it "
    "was lost on its way; noise without its keys",
    f"{SITES}/<site>/{SUMS}": "of a sealed study: whose numbers were in the sums that the site helped to open. It "
    "never leaves the site",
    f"{SITES}/<site>/{ANSWER_FILES}": "in a study that is charged to the site's privacy ledger: its last answers, so "
    "that one that has to be sent again is the same and costs nothing",
    f"{SITES}/<site>/{NOISY_COUNTS}": "where a study tells numbers of cases with noise: those numbers, drawn once",
    f"{SITES}/<site>/{SPENT}": "in such a study: what it and all studies of these data cost (ε at δ), for the "
    "hospital's own report. It never leaves the site",
    f"{SITES}/<site>/{CASES}": "what was measured of each test case. Case and patient are numbers in the order of the "
    "data; a cell is empty where a case has no such value. It never leaves the site",
    f"{SITES}/<site>/{ERRORS}": "the full text of errors. It never leaves the site",
    f"{SITES}/<site>/{WORKER_LOG}": "the output of the training process. It never leaves the site",
    f"{SITES}/<site>/{WORKED}": "the minutes that the site has worked for the study, against its limits.study_minutes",
    f"{SITES}/<site>/{NOW}": "while the site works on an answer: what it does, and the share of its training that is "
    "done. It never leaves the site",
    f"{SITES}/<site>/{DIARY}": "under NVFlare: a line for each answer that left the site, and for each that did not, "
    "with the reason. It never leaves the site",
    f"{SITES}/<site>/{DATA}": "folder tasks: what was found among the site's files, with the names of files left out. "
    "It never leaves the site",
    f"{SITES}/<site>/{PICTURES}/": "images before and after HarmoFL's normalisation, and the best, median and worst "
    "test case with the structures found in it. Only synthetic images, or where the site's `pictures` allows it",
    f"{JOB}/": "the submitted job (simulator only)",
    f"{NVFLARE}/": "NVFlare's workspace (simulator only)",
    NVFLARE_LOG: "NVFlare's log (simulator only)",
}

STUDY_TREE: Mapping[str, str] = {
    "<row>-<seed>/": "one run's folder for each row and seed",
    VERDICT: "scores, differences and intervals of what is finished",
    REPORT: "the page about all of it",
    f"{HOSPITALS}/<site>.html": "a decision sheet for one hospital, one printed page (`medsilo report --hospitals`)",
    f"{LOCKS}/": "empty files, held by the comparison and by its runs as long as they go on",
}

# What the lead may fetch; the super model holds personal models of sites that agreed, and of no others.
SHARED_FOLDERS = (GLOBAL, SUPER_MODEL, FIGURES)
PUBLISHED = (PLAN, PROVENANCE, JOBS, ROUNDS, SUMMARY, *SHARED_FOLDERS)


def site_folder(run: Path, site: str) -> Path:
    """Return a site's part of a run's folder."""
    return run / SITES / site


def hospital_folder(place: Path) -> Path:
    """Return where a hospital remembers what it answered, from a site's part of a run's folder."""
    return place.absolute().parents[2] / HOSPITAL
