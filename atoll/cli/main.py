"""``atoll``: one verb a file. Errors of Atoll are one sentence and an exit code; anything else is a bug and shows its trace."""

from __future__ import annotations

import sys

import typer

from atoll.cli import generate, lab, plan, probe, report, simulate, train
from atoll.cli.common import complain
from atoll.errors import AtollError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  help="Train large models on the machines people really have: measure, plan, simulate, run, report.")

app.command("probe")(probe.probe)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate_command)
app.command("train")(train.train)
app.command("worker")(train.worker)
app.command("generate")(generate.generate_command)
app.command("export")(generate.export_command)
app.command("report")(report.report)
app.command("lab", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(lab.lab)
app.command("doctor")(probe.doctor)


def main() -> None:
    """Entry point of the console script."""
    as_json = "--json" in sys.argv
    try:
        app()
    except AtollError as error:
        complain(error, as_json)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("atoll: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)


if __name__ == "__main__":
    main()
