"""What all verbs share: consoles, machine-readable output, and errors as one sentence."""

from __future__ import annotations

import json
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

__all__ = ["ClusterOption", "JsonOption", "Output", "complain", "default_cluster", "load_documents"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one machine-readable JSON object and nothing else.")]
ClusterOption = Annotated[Path | None, typer.Option("--cluster", "-c", help="cluster.yaml (left out: this machine alone).")]


class Output:
    """People read the console; with ``--json`` only the final object goes to standard output."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @property
    def console(self) -> Console:
        from rich.console import Console

        return Console(stderr=self.as_json, soft_wrap=False, highlight=False, emoji=False)

    def show(self, *things: Any) -> None:
        if not self.as_json:
            for thing in things:
                self.console.print(thing)

    def show_text(self, text: str) -> None:
        """Print ``text`` as it is: no markup, no wrapping by words."""
        if not self.as_json:
            self.console.print(text, markup=False, highlight=False)

    def heading(self, text: str) -> None:
        self.show(f"\n[bold]{text}[/bold]")

    def sentences(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.show(f"  {line}")

    def finish(self, value: Any) -> None:
        """The one object of ``--json`` (a record or plain values); silent otherwise."""
        if self.as_json:
            from atoll.records import to_plain

            print(json.dumps(to_plain(value)))


def complain(error: AtollError, as_json: bool) -> None:
    """One sentence to standard error (and with ``--json`` one object to standard output)."""
    if as_json:
        print(json.dumps({"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}))
    print(f"atoll: {error}", file=sys.stderr)


def load_documents(job_path: Path, cluster_path: Path | None) -> tuple[Job, Cluster]:
    from atoll.cluster.network import load_cluster
    from atoll.records import load

    job = load(job_path, Job)
    return job, load_cluster(cluster_path) if cluster_path else default_cluster()


def default_cluster() -> Cluster:
    """This machine alone: one worker on its CPU (``atoll probe`` describes it better)."""
    from atoll.cluster.cluster import Device, Island, Machine
    from atoll.units import Bandwidth

    return Cluster(name="this-machine", islands={"here": Island(bandwidth=Bandwidth(10**9))},
                   machines=(Machine(name="here", island="here", devices=(Device(kind="cpu-core"),)),))
