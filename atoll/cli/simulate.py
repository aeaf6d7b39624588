"""``atoll simulate``: run a plan under the virtual clock and show its timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import JsonOption, Output, load_documents
from atoll.cli.plan import captured_graph

__all__ = ["simulate_command"]


def simulate_command(
    job: Annotated[Path, typer.Argument(help="job.yaml")],
    cluster: Annotated[Path | None, typer.Option("--cluster", "-c", help="cluster.yaml")] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.yaml (left out: the planner makes one).")] = None,
    steps: Annotated[int, typer.Option(help="Steps to simulate.")] = 3,
    trace: Annotated[Path | None, typer.Option(help="Write the predicted trace there (.jsonl).")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the timeline there (.png).")] = None,
    grid: Annotated[bool, typer.Option(help="Print the order of compute as text.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate one plan: step time, both bubbles, memory per worker, bytes per link, timeline. No torch is needed.

    Example:  atoll simulate examples/demo/job.yaml --cluster examples/demo/cluster.yaml --picture timeline.png
    """
    from atoll.plan.plan import Plan
    from atoll.planner.predict import predict
    from atoll.planner.problem import problem_of
    from atoll.planner.search import search
    from atoll.program.grid import grid as program_grid
    from atoll.records import load
    from atoll.report import text

    output = Output(as_json)
    wanted, machines = load_documents(job, cluster)
    problem = problem_of(wanted, machines, graph=captured_graph(wanted))
    chosen = load(plan, Plan) if plan else search(problem, wanted).prediction.plan
    prediction = predict(problem, chosen, steps=steps)
    output.show(text.prediction_table(prediction.summary))
    if grid:
        output.show(program_grid(prediction.program))
    if trace:
        from atoll.trace.files import write_trace

        write_trace(trace, prediction.simulation.trace())
        output.show(f"trace written to {trace}")
    if picture:
        from atoll.report.timeline import draw_timeline

        draw_timeline(prediction.simulation.trace(), picture)
        output.show(f"picture written to {picture}")
    output.finish(prediction.summary)
