"""Train nnU-Net across hospitals: compute a joint fingerprint of the hospitals' data, and make nnU-Net's plans from
this fingerprint.

The package nnunetv2 (`pip install medsilo[nnunet]`) is imported only in the functions that need it.
"""

NEEDED = "this needs nnU-Net; pip install medsilo[nnunet]"
PLANNERS = ("ExperimentPlanner", "nnUNetPlannerResEncM", "nnUNetPlannerResEncL", "nnUNetPlannerResEncXL")
