"""Names of files and folders of runs and comparisons (docs/reference/run-folder.md), and of a lead's
requests to a job.
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
CHECKPOINTS = "checkpoints"
GLOBAL = "global"
SUPER_MODEL = "supermodel"
SITES = "sites"
JOB = "job"
NVFLARE = "nvflare"
NVFLARE_LOG = "nvflare.log"
REFUSED = "medsilo-refused.txt"  # in NVFlare's folder of the job

# Names of files in the folders above.
BEST, LAST = "best.safetensors", "last.safetensors"
ROUND_FILES, BEST_FILES, STATE_FILES = "round-*.safetensors", "best-*.safetensors", "state-*.safetensors"
SEALING, SEALED = "secure-aggregation.json", "secure-aggregation.safetensors"
ANSWER_FILES = "answer-*.safetensors"
SPENT = "privacy.json"
WEIGHT = "weight.json"
LEDGER_HEADS = "ledger-heads.json"  # at the server, next to the studies: latest heads of hospitals' privacy ledgers
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

# Folder of a hospital's records, next to its studies; names of studies cannot begin with an underscore.
HOSPITAL = "_hospital"
MODELS = "_models"  # files that the server sent to a hospital for its studies, next to these

# ---------------------------------------------------------------------------------------------------- a comparison's
COMPARISON = "comparison.json"
VERDICT = "verdict.json"
LOCKS = ".locks"

# Folders that the lead may download; the super model contains personal models only of sites that agreed.
SHARED_FOLDERS = (GLOBAL, SUPER_MODEL)
PUBLISHED = (PLAN, PROVENANCE, JOBS, ROUNDS, SUMMARY, *SHARED_FOLDERS)

# A lead's request to a running job, and the job's answer.
PROGRESS, AFTER = "medsilo.progress", "after"  # parameter: rounds after this number
CANCELS = "cancels"  # announces that the job will be cancelled, and by whom
OUTCOME = "outcome"  # in a failed job's metadata: the reason
GOES_ON = "goes_on"  # in a failed job's metadata: time and number of the next automatic restart


def site_folder(run: Path, site: str) -> Path:
    """Return a site's folder within a run's folder."""
    return run / SITES / site


def hospital_folder(place: Path) -> Path:
    """Return the folder of a hospital's query budget, given a site's folder within a run."""
    return place.absolute().parents[2] / HOSPITAL
