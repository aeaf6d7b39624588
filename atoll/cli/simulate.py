"""``atoll simulate``: run a plan under the virtual clock and show its timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import JsonOption, Output, ProfileOption, check_file, load_documents, load_plan, load_profile
from atoll.cli.plan import graph_of

__all__ = ["simulate_command"]


def simulate_command(
    job: Annotated[Path, typer.Argument(help="job.yaml")],
    cluster: Annotated[Path | None, typer.Option("--cluster", "-c", help="cluster.yaml")] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.yaml (left out: the planner makes one).")] = None,
    steps: Annotated[int, typer.Option(help="Steps to simulate.", min=1, max=1000)] = 3,
    trace: Annotated[Path | None, typer.Option(help="Write the predicted trace there (.jsonl).")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the timeline there (.png).")] = None,
    grid: Annotated[bool, typer.Option(help="Print the order of compute as text.")] = False,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate one plan: step time, both bubbles, memory per worker, bytes per link, timeline. No torch is needed.

    Example:  atoll simulate examples/demo/job.yaml --cluster examples/demo/cluster.yaml --picture timeline.png
    """
    from atoll.planner.explain import overfull
    from atoll.planner.predict import predict
    from atoll.planner.problem import problem_of, with_vocabulary
    from atoll.planner.search import search
    from atoll.program.grid import grid as program_grid
    from atoll.report import text

    output = Output(as_json)
    for option, path in (("--trace", trace), ("--picture", picture)):
        if path is not None:
            check_file(path, option)
    wanted, machines = load_documents(job, cluster)
    wanted = with_vocabulary(wanted)
    graph = graph_of(wanted)
    problem = problem_of(wanted, machines, load_profile(profile, graph), graph)
    chosen, notes = load_plan(plan, problem, wanted) if plan else (search(problem, wanted).prediction.plan, ())
    output.sentences(notes)
    prediction = predict(problem, chosen, steps=steps)
    output.sentences(overfull(problem, prediction))
    output.show(text.prediction_table(prediction.summary))
    if grid:
        output.show_text(program_grid(prediction.program))
    if trace:
        from atoll.trace.files import write_trace

        write_trace(trace, prediction.simulation.trace())
        output.show_text(f"trace written to {trace}")
    if picture:
        from atoll.report.timeline import draw_timeline

        draw_timeline(prediction.simulation.trace(), picture)
        output.show_text(f"picture written to {picture}")
    output.finish(prediction.summary)
