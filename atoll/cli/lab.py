"""``atoll lab -- COMMAND``: any command once per machine of a cluster, under its links, speeds and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import Output

__all__ = ["lab"]


def lab(
    context: typer.Context,
    cluster: Annotated[Path, typer.Option("--cluster", "-c", help="cluster.yaml with the machines to play.")],
) -> None:
    """Run a command once per machine of a cluster, each in a network namespace of its own (root is needed).

    Every copy finds ATOLL_MACHINE, ATOLL_RANK, ATOLL_WORLD_SIZE, ATOLL_ADDRESSES, MASTER_ADDR and so on in its environment.

    Example:  atoll lab --cluster examples/demo/cluster.yaml -- sh -c 'echo $ATOLL_MACHINE; ping -c 2 $MASTER_ADDR'
    """
    from atoll.cluster.network import load_cluster
    from atoll.errors import DocumentError
    from atoll.lab.command import run_everywhere

    if not context.args:
        raise DocumentError("atoll lab: give a command after --, for example: atoll lab -c cluster.yaml -- hostname")
    machines = load_cluster(cluster)
    Output(False).show(f"{len(machines.machines)} machines: {', '.join(machine.name for machine in machines.machines)}")
    raise typer.Exit(run_everywhere(machines, context.args))
