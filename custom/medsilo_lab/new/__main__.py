"""Write a package with a small method, task or network: python -m medsilo_lab.new KIND NAME."""

import sys

import typer

from medsilo.cli import one_line
from medsilo.cli.show import command
from medsilo_lab.new.making import new

app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command(epilog="example: python -m medsilo_lab.new method my-method")(command(new))
try:
    sys.exit(typer.main.get_command(app).main(prog_name="python -m medsilo_lab.new", standalone_mode=False) or 0)
except typer.TyperException as error:
    sys.exit(one_line(error, sys.argv[1:]))
