"""Define the names of files and folders of runs and comparisons, and the names of a lead's requests to a job."""

from pathlib import Path

# ---------------------------------------------------------------------------------------------------- a run's folder
PLAN = "plan.yaml"
PROVENANCE = "provenance.json"
JOBS = "jobs.txt"
LOCK = "jobs.lock"
LEAD = "lead.txt"
ROUNDS = "rounds.jsonl"
SUMMARY = "summary.json"
NOW = "status.json"
REPORT = "report.html"
HOSPITALS = "hospitals"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
GLOBAL = "global"
SUPER_MODEL = "supermodel"
SITES = "sites"
JOB = "job"
NVFLARE = "nvflare"
NVFLARE_LOG = "nvflare.log"
# file in NVFlare's folder of a job with the reason why medsilo rejected the job
REFUSED = "medsilo-refused.txt"

# Names of files in the folders of runs and of hospitals.
BEST, LAST = "best.safetensors", "last.safetensors"
ROUND_FILES, BEST_FILES, STATE_FILES = "round-*.safetensors", "best-*.safetensors", "state-*.safetensors"
SEALING, SEALED = "secure-aggregation.json", "secure-aggregation.safetensors"
ANSWER_FILES = "answer-*.safetensors"
SPENT = "privacy.json"
WEIGHT = "weight.json"
LEDGER_HEADS = "ledger-heads.json"  # latest heads of privacy ledgers, at the server
NOISY_COUNTS = "counts.json"
METRICS = "metrics.csv"
CASES = "test.csv"
SUBGROUPS = "subgroups.csv"
DATA = "data.json"
ERRORS = "errors.log"
WORKER_LOG = "worker.log"
DIARY = "log.jsonl"
PICTURES = "pictures"
EMBEDDINGS = "embeddings-{}.safetensors"

# Name of a hospital's folder of records. No study's folder can have this name, because a study's name cannot begin with
# an underscore.
HOSPITAL = "_hospital"
# name of a hospital's folder for the files that the server sent, such as initial weights
MODELS = "_models"

# ------------------------------------------------------------------------------------------------ a comparison
COMPARISON = "comparison.json"
VERDICT = "verdict.json"
LOCKS = ".locks"

# Folders of a run that the lead may download. The super model contains no personal models except those that sites
# agreed to share.
SHARED_FOLDERS = (GLOBAL, SUPER_MODEL)
PUBLISHED = (PLAN, PROVENANCE, JOBS, ROUNDS, SUMMARY, *SHARED_FOLDERS)

# A lead's request to a running job, and two parameters of the request
PROGRESS, AFTER = "medsilo.progress", "after"
CANCELS = "cancels"  # parameter of a lead's request: the name of the person who cancels the study
OUTCOME = "outcome"  # key in a failed job's metadata: why the job failed
# key in a failed job's metadata: when the next automatic restart happens, and its index
GOES_ON = "goes_on"


def site_folder(run: Path, site: str) -> Path:
    return run / SITES / site


def hospital_folder(folder: Path) -> Path:
    """Return the hospital's folder of records; `folder` is the site's folder in a run."""
    return folder.absolute().parents[2] / HOSPITAL
