"""``atoll``: one verb a file. Errors of Atoll are one sentence and an exit code; anything else is a bug and shows its trace.

Exit codes: 0 done, 1 failed, 2 a wrong document, option, model or corpus, 3 no plan, 4 no such checkpoint, 5 this machine lacks
something (disk, port, right), 6 a worker was lost, 7 membership cannot be told, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import typer

from atoll.cli import generate, lab, ledger, plan, probe, report, simulate, train
from atoll.cli.common import complain
from atoll.errors import AtollError, DocumentError, InterruptError, WorkplaceError

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
app.command("ledger")(ledger.ledger)
app.command("lab", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(lab.lab)
app.command("doctor")(probe.doctor)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it would print comes as a sentence of ours
    sys.path.append(os.getcwd())  # where a user's own module lies; the workers find it there too
    arguments = sys.argv[1:] or ["--help"]
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read along (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        code = app(arguments, standalone_mode=False)
        if code == InterruptError.exit_code:  # made of a KeyboardInterrupt by the option parser
            raise InterruptError("interrupted")
        return code if isinstance(code, int) else 0
    except AtollError as error:
        complain(error, as_json)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain(InterruptError("interrupted"), as_json)
        return InterruptError.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        known = _of_this_machine(error)
        if known is None:
            raise
        complain(known, as_json)
        return known.exit_code
    except Exception as error:
        usage = _of_the_command_line(error)
        if usage is None:
            raise
        complain(usage, as_json)
        return usage.exit_code


_OF_THE_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


def _of_this_machine(error: OSError) -> WorkplaceError | None:
    """What the disk or its owner refused, as a sentence; None for anything that would be a bug."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f" ({error.filename})" if error.filename else ""
        return WorkplaceError(f"the disk is full{where}: free space there, or name a folder on another disk")
    if error.errno in _OF_THE_PLACE and error.filename:
        return WorkplaceError(f"{error.filename}: {error.strerror}; name another place, or change its rights")
    return None


def _of_the_command_line(error: Exception) -> DocumentError | None:
    """A usage error of the option parser (which packs its own copy of click): what is wrong and where help is."""
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    verb = getattr(context, "command_path", "atoll")
    return DocumentError(f"{message().rstrip('.')}; {verb} --help shows what there is")


if __name__ == "__main__":
    main()
