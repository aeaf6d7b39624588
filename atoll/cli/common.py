"""What all verbs share: consoles, machine-readable output, and errors as one sentence."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cluster.cluster import Cluster
from atoll.errors import AtollError
from atoll.plan.job import Job

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.cluster.calibration import Profile
    from atoll.graph.graph import Graph
    from atoll.plan.plan import Plan
    from atoll.planner.times import Problem

__all__ = [
    "ClusterOption",
    "JsonOption",
    "Output",
    "ProfileOption",
    "check_file",
    "complain",
    "default_cluster",
    "load_documents",
    "load_job",
    "load_plan",
    "load_profile",
    "printable",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one machine-readable JSON object and nothing else.")]
ClusterOption = Annotated[Path | None, typer.Option("--cluster", "-c", help="cluster.yaml (left out: this machine alone).")]

ProfileOption = Annotated[Path | None, typer.Option(
    "--profile", help="profile.json of a run, for times measured on these devices (left out: the catalogue's).")]


class Output:
    """People read the console; with ``--json`` only the final object goes to standard output."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @property
    def console(self) -> Console:
        from rich.console import Console

        return Console(stderr=self.as_json, soft_wrap=False, highlight=False, emoji=False)

    def show(self, *things: Any) -> None:
        """Print tables and texts; a text is taken as it is (brackets in it are no markup) and wrapped by words."""
        if not self.as_json:
            for thing in things:
                self.console.print(thing, markup=None if not isinstance(thing, str) else False)

    def show_text(self, text: str) -> None:
        """Print ``text`` as it is: no markup, no wrapping."""
        if not self.as_json:
            self.console.print(text, markup=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        if not self.as_json:
            self.console.print(f"\n{text}", style="bold", markup=False)

    def sentences(self, lines: Iterable[str]) -> None:
        """One paragraph a line, indented as a whole."""
        from rich.padding import Padding
        from rich.text import Text

        for line in lines:
            self.show(Padding(Text(line), (0, 0, 0, 2)))

    def say(self, line: str) -> None:
        self.sentences([line])

    def finish(self, value: Any) -> None:
        """The one object of ``--json`` (a record or plain values); silent otherwise."""
        if self.as_json:
            from atoll.records import to_plain

            print(json.dumps(_finite(to_plain(value)), allow_nan=False))


def _finite(value: Any) -> Any:
    """``value`` with null for what JSON cannot say (a loss that is not a number)."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """``text`` without what would steer a terminal: a young model writes any bytes."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def complain(error: AtollError, as_json: bool) -> None:
    """One sentence to standard error (and with ``--json`` one object to standard output)."""
    if as_json:
        print(json.dumps({"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}))
    print(f"atoll: {error}", file=sys.stderr)


def load_documents(job_path: Path, cluster_path: Path | None) -> tuple[Job, Cluster]:
    from atoll.cluster.network import load_cluster

    return load_job(job_path), load_cluster(cluster_path) if cluster_path else default_cluster()


def load_profile(path: Path | None, graph: Graph) -> Profile:
    """What a run measured (its profile.json) of the model ``graph``; None: nothing. Raises ``DocumentError`` when it was of
    another one."""
    from atoll.cluster.calibration import Profile
    from atoll.errors import DocumentError
    from atoll.records import load

    if path is None:
        return Profile()
    found = load(path, Profile).fitting(graph.name, graph.work)
    if not found.measured:
        raise DocumentError(f"--profile: {path} was not measured for this model, sequence length and precision; a run of this "
                            "job writes one that is")
    return found


def load_job(path: Path) -> Job:
    """The job of a file, its model looked up. Raises ``DocumentError``, and ``GraphError`` for a model that is not known."""
    from atoll.errors import GraphError
    from atoll.graph.build import check_positions
    from atoll.records import load

    job = _at_home(load(path, Job), path.absolute().parent)
    try:
        check_positions(job.model, job.sequence_length)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None
    return job


def _at_home(job: Job, base: Path) -> Job:
    """``job`` with the model's folder counted from the job's own folder, as the data is, where it lies there."""
    import msgspec

    folder = job.model.folder
    if folder is None or Path(folder).is_absolute() or not (base / folder).exists():
        return job
    return msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, folder=str(base / folder)))


def load_plan(path: Path, problem: Problem, job: Job) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a file, and what there is to say about it. Raises ``PlanError`` when it breaks a rule."""
    from atoll.errors import PlanError
    from atoll.plan.plan import Plan
    from atoll.plan.rules import check_plan, made_for_others
    from atoll.records import load

    plan = load(path, Plan)
    try:
        check_plan(plan, job, problem.graph, problem.network.workers)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return plan, made_for_others(plan, job, problem.cluster)


def check_file(path: Path, option: str) -> None:
    """Raise ``WorkplaceError`` before anything is computed when ``path`` cannot be written."""
    from atoll.errors import WorkplaceError

    there = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not there.is_dir() or not os.access(there, os.W_OK):
        why = "it is a folder" if path.is_dir() else f"{there} is no folder that may be written"
        raise WorkplaceError(f"{option}: {path} cannot be written: {why}; name another file")


def default_cluster() -> Cluster:
    """This machine alone: one worker on its CPU (``atoll probe`` describes it better)."""
    from atoll.cluster.cluster import Device, Island, Machine
    from atoll.units import Bandwidth

    return Cluster(name="this-machine", islands={"home": Island(bandwidth=Bandwidth(10**9))},
                   machines=(Machine(name="here", island="home", devices=(Device(kind="cpu-core"),)),))
