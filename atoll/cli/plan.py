"""``atoll plan``: what fits, how fast, for how long and how much, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import ClusterOption, JsonOption, Output, default_cluster
from atoll.graph.graph import Graph
from atoll.plan.job import Job

__all__ = ["captured_graph", "plan"]


def plan(
    job: Annotated[Path | None, typer.Argument(help="job.yaml (or say --model and --tokens)")] = None,
    cluster: ClusterOption = None,
    model: Annotated[str | None, typer.Option(help="A known shape such as llama-3-8b, or a path to a config.json.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, such as 10B.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences a step (default: about 500k tokens).")] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp32 or fp64 (with --model).")] = "bf16",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan there (plan.yaml).")] = None,
    seconds: Annotated[float, typer.Option(help="How long to search.")] = 5.0,
    advice: Annotated[bool, typer.Option(help="Also look for the one change that would help most.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Plan a run without running it: nothing but Atoll is needed, no torch, no weights, no machine.

    Example:  atoll plan --model llama-3-8b --tokens 10B --cluster examples/clusters/home-and-lab.yaml
    """
    from atoll.cluster.network import load_cluster
    from atoll.planner.advice import advise
    from atoll.planner.bill import bill
    from atoll.planner.explain import explain, explain_bill
    from atoll.planner.problem import problem_of
    from atoll.planner.search import Budget, search
    from atoll.records import save, to_plain
    from atoll.report import text

    output = Output(as_json)
    wanted = _job(job, model, tokens, sequence_length, global_batch, precision)
    machines = load_cluster(cluster) if cluster else default_cluster()
    output.heading("Cluster")
    output.show(text.cluster_table(machines))
    problem = problem_of(wanted, machines, graph=captured_graph(wanted))
    decision = search(problem, wanted, Budget(seconds=seconds))
    found = advise(problem, wanted) if advice else ()
    figures = bill(problem, wanted, decision.prediction)
    sentences = explain(problem, decision, found)
    output.heading("Plan")
    output.sentences(sentences)
    output.heading("Prediction")
    output.show(text.prediction_table(decision.prediction.summary))
    output.show(f"  {explain_bill(figures)}")
    if out:
        save(out, decision.prediction.plan)
        output.show(f"\n  plan written to {out}")
    output.finish({"plan": to_plain(decision.prediction.plan), "summary": to_plain(decision.prediction.summary),
                   "bill": to_plain(figures), "advice": to_plain(found), "explanation": list(sentences)})


def captured_graph(job: Job) -> Graph | None:
    """The graph of a user's own module (needs torch); None where the analytic builder knows the family."""
    if job.model.module is None:
        return None
    from atoll.plan.job import PRECISIONS
    from atoll.runtime.capture import capture

    return capture(job.model, job.sequence_length, 1, PRECISIONS[job.precision].compute).graph


def _job(path: Path | None, model: str | None, tokens: str | None, sequence_length: int | None, global_batch: int | None,
         precision: str) -> Job:
    """The job of the file, or one made from the options."""
    from atoll.errors import DocumentError
    from atoll.planner.problem import longest_sequence, named_model
    from atoll.records import load
    from atoll.units import Count

    if (path is None) == (model is None):
        raise DocumentError("atoll plan: give either a job.yaml or --model with --tokens")
    if path is not None:
        return load(path, Job)
    assert model is not None
    if tokens is None:
        raise DocumentError("atoll plan: --model needs --tokens, such as --tokens 10B")
    spec = named_model(model)
    length = sequence_length or min(longest_sequence(spec), 4096)
    try:
        count = Count(Count.parse(tokens))
    except ValueError as error:
        raise DocumentError(f"atoll plan --tokens: {error}") from None
    batch = global_batch or max(1, 1 << ((2**19 // length).bit_length() - 1))
    return Job(name=model, model=spec, sequence_length=length, global_batch=batch, tokens=count, precision=precision)
