# Tries to read and change another hospital's folder, the study's stored state, and other folders on the disk.
import os

from knows import FOLDER, OTHER, STUDY
from lead import tries

for folder in (
    OTHER,
    FOLDER,
    STUDY,
    "/home",
    "/root",
    "/srv",
    "/mnt",
    "/media",
    "/opt",
    "/var/lib",
    "/etc/ssl/private",
):
    tries(f"names in {folder}", lambda: next(own.name for own in os.scandir(folder) if own.is_file()))
    tries(f"a file in {folder}", lambda: open(f"{folder}/left-here", "w"))
tries("its patients", lambda: open(f"{OTHER}/patients.csv").read())
tries("by its own folder", lambda: open(f"/proc/self/cwd/{'../' * 9}{OTHER}/patients.csv").read())
tries("a state", lambda: [name for _, _, names in os.walk("/") for name in names if name.endswith(".safetensors")][0])
