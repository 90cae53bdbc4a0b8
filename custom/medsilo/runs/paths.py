"""Every name of files and folders in a run and a comparison (docs/reference/run-folder.md), and in what a lead asks."""

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
REFUSED = "medsilo-refused.txt"  # in NVFlare's own run folder

# What is in the folders above.
BEST, LAST = "best.safetensors", "last.safetensors"
ROUND_FILES, BEST_FILES, STATE_FILES = "round-*.safetensors", "best-*.safetensors", "state-*.safetensors"
SEALING, SEALED = "secure-aggregation.json", "secure-aggregation.safetensors"
ANSWER_FILES = "answer-*.safetensors"
SPENT = "privacy.json"
LEDGER_HEADS = "ledger-heads.json"  # beside the studies, at the server: what hospitals' ledgers were last
NOISY_COUNTS = "counts.json"
METRICS = "metrics.csv"
CASES = "test.csv"
DATA = "data.json"
ERRORS = "errors.log"
WORKER_LOG = "worker.log"
DIARY = "log.jsonl"
PICTURES = "pictures"

# What a hospital keeps beside its studies; no study can have a name that begins with this character.
HOSPITAL = "_hospital"
MODELS = "_models"  # of files that were sent to a hospital for its studies, beside these

# ---------------------------------------------------------------------------------------------------- a comparison's
COMPARISON = "comparison.json"
VERDICT = "verdict.json"
LOCKS = ".locks"

# What the lead may fetch; the super model holds personal models of sites that agreed, and of no others.
SHARED_FOLDERS = (GLOBAL, SUPER_MODEL)
PUBLISHED = (PLAN, PROVENANCE, JOBS, ROUNDS, SUMMARY, *SHARED_FOLDERS)

# What a lead asks of a running job, and the job says.
PROGRESS, AFTER = "medsilo.progress", "after"  # the rounds after this one
CANCELS = "cancels"  # with it, that the job is about to be ended, and by whom
GOES_ON = "goes_on"  # in the meta of a job that died: which of how many times its study goes on by itself


def site_folder(run: Path, site: str) -> Path:
    """Return a site's part of a run's folder."""
    return run / SITES / site


def hospital_folder(place: Path) -> Path:
    """Return where a hospital remembers what it answered, from a site's part of a run's folder."""
    return place.absolute().parents[2] / HOSPITAL
