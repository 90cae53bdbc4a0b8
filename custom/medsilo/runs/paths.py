"""Names of the files and folders of runs and comparisons (docs/reference/run-folder.md), and names of a lead's requests
to a job.
"""

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
REFUSED = "medsilo-refused.txt"  # file in NVFlare's folder of the job

# Names of further files of runs and hospitals.
BEST, LAST = "best.safetensors", "last.safetensors"
ROUND_FILES, BEST_FILES, STATE_FILES = "round-*.safetensors", "best-*.safetensors", "state-*.safetensors"
SEALING, SEALED = "secure-aggregation.json", "secure-aggregation.safetensors"
ANSWER_FILES = "answer-*.safetensors"
SPENT = "privacy.json"
WEIGHT = "weight.json"
LEDGER_HEADS = "ledger-heads.json"  # at the server, in the folder of all studies: latest heads of privacy ledgers
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

# Folder of a hospital's records, in the folder of all studies. Names of studies cannot begin with an underscore.
HOSPITAL = "_hospital"
MODELS = "_models"  # in the folder of all studies: files that the server sent to a hospital, such as initial weights

# ---------------------------------------------------------------------------------------------------- a comparison's
COMPARISON = "comparison.json"
VERDICT = "verdict.json"
LOCKS = ".locks"

# Folders that the lead may download; the super model contains personal models only of sites that agreed.
SHARED_FOLDERS = (GLOBAL, SUPER_MODEL)
PUBLISHED = (PLAN, PROVENANCE, JOBS, ROUNDS, SUMMARY, *SHARED_FOLDERS)

# A lead's request to a running job, and the job's answer.
PROGRESS, AFTER = "medsilo.progress", "after"  # parameter of the request: only rounds after this number
CANCELS = "cancels"  # announces that the job will be cancelled, and by whom
OUTCOME = "outcome"  # in a failed job's metadata: the reason
GOES_ON = "goes_on"  # in a failed job's metadata: time and number of the next automatic restart


def site_folder(run: Path, site: str) -> Path:
    """Return a site's folder within a run's folder."""
    return run / SITES / site


def hospital_folder(place: Path) -> Path:
    """Return the folder of a hospital's query budget, given a site's folder within a run."""
    return place.absolute().parents[2] / HOSPITAL
