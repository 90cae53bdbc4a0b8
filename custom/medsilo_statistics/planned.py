"""The question that a plan has before it trains: who has how many cases of what is learned."""

from pathlib import Path

from medsilo.extend import MedsiloError, find_job, plan_of, survival
from medsilo_statistics.asked_question import Question, make_question, read_question

NARROW = 0.05  # half width of the interval of a share, for which cases are counted
SIZE = {"range": [0, 4096], "step": 1, "unit": "voxels"}


def question_at(path: Path) -> Question:
    """Return the question of a file, or of the plan of a job's folder."""
    if path.is_file():
        return read_question(path)
    plan = plan_of(find_job(path))
    task = plan.task
    if task.deals:
        raise MedsiloError("the plan deals one table to hospitals, which is for trying out; ask each hospital's own")
    labels = survival.EVENTS if getattr(task, "kind", "") == "survival" else task.goal.label_names
    counted = "label" if task.goal.classifies or labels is survival.EVENTS else "size_x"
    values = {
        "title": f"Cases for {plan.algorithm.title}, task {task.name}",
        "sites": list(plan.participation.sites),
        "task": task.model_dump(mode="json"),
        "variables": {counted: {"levels": list(labels)} if counted == "label" else SIZE},
        "table": [counted],
        "by_hospital": True,
        "wanted": {"label": NARROW} if counted == "label" else {},
    }
    return make_question(values, "the plan's question")
