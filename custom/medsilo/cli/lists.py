"""Commands that list what there is: methods, tasks."""

from medsilo.cli.show import Screen


def methods(screen: Screen) -> int:
    """List the methods.

    With the paper, and what leaves a hospital.
    """
    screen.note("loading the methods")
    from medsilo.check.leaks import leaving
    from medsilo.registry import METHODS

    rows = [(name, method.title, method.paper, leaving(method())) for name, method in METHODS.items()]
    lines = [f"{name:<14} {paper:<23} leaves: {leaves}" for name, _, paper, leaves in rows]
    columns = ("name", "title", "paper", "leaves")
    screen.table(columns, rows, lines)
    screen.say("run central with --engine inprocess, or beside others: medsilo compare --methods central,fedavg")
    screen.answer(methods=[dict(zip(columns, row, strict=True)) for row in rows])
    return 0


def tasks(screen: Screen) -> int:
    """List the tasks.

    With the metric of each; a plan names one as task.name.
    """
    screen.note("loading the tasks")
    from medsilo.registry import TASKS

    # Of some tasks the plan decides on the metric; others can't be made without a plan.
    rows = [
        (name, task.title, task.metric if isinstance(task.metric, str) else task().metric)
        for name, task in TASKS.items()
    ]
    columns = ("name", "title", "metric")
    screen.table(columns, rows, [f"{name:<19} {title} ({metric})" for name, title, metric in rows])
    screen.answer(tasks=[dict(zip(columns, row, strict=True)) for row in rows])
    return 0
