"""nnU-Net over hospitals: the fingerprint of data that lie apart, and the plans that its planner makes of it.

Nothing else knows the package nnunetv2 (`pip install medsilo[nnunet]`), which is imported where it is called.
"""

NEEDED = "this needs nnU-Net; pip install medsilo[nnunet]"
PLANNERS = ("ExperimentPlanner", "nnUNetPlannerResEncM", "nnUNetPlannerResEncL", "nnUNetPlannerResEncXL")
