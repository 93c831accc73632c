"""Entry point of `fairchem-janus`.

Every sub-command lives in a file of its own and offers `register(app)`. Heavy imports (torch, fairchem) belong inside
the command functions, so that `--help` and the planning commands answer at once.
"""

from __future__ import annotations

import typer

from fairchem_janus.cli import (
    convert,
    data_demo,
    data_import,
    data_pack,
    data_stats,
    plan,
    results,
    simulate,
    sweep,
    verify,
)

app = typer.Typer(
    name="fairchem-janus",
    help="Pipeline-parallel training of conservative interatomic potentials with fairchem.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Make, import, inspect and pack data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

for data_command in (data_demo, data_import, data_stats, data_pack):
    data_command.register(data_app)
simulate.register(app)
plan.register(app)
verify.register(app)
sweep.register(app)
results.register(app)
convert.register(app)
