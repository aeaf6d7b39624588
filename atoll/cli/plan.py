"""``atoll plan``: what fits, how fast, for how long and how much, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import (
    ClusterOption,
    JsonOption,
    Output,
    ProfileOption,
    check_file,
    default_cluster,
    load_job,
    load_profile,
)
from atoll.graph.graph import Graph
from atoll.plan.job import Job

__all__ = ["graph_of", "plan"]


def plan(
    job: Annotated[Path | None, typer.Argument(help="job.yaml (or say --model and --tokens)")] = None,
    cluster: ClusterOption = None,
    model: Annotated[str | None, typer.Option(help="A known shape such as llama-3-8b, or a path to a config.json.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, such as 10B.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens a sequence.", min=1)] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences a step (default: about 500k tokens).", min=1)] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 (default), fp32 or fp64 (with --model).")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan there (plan.yaml).")] = None,
    seconds: Annotated[float, typer.Option(help="How long to search.", min=0)] = 5.0,
    advice: Annotated[bool, typer.Option(help="Also look for the one change that would help most.")] = True,
    profile: ProfileOption = None,
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
    if out is not None:
        check_file(out, "--out")
    wanted = _job(job, model, tokens, sequence_length, global_batch, precision)
    machines = load_cluster(cluster) if cluster else default_cluster()
    output.heading("Cluster")
    output.show(text.cluster_table(machines))
    graph = graph_of(wanted)
    problem = problem_of(wanted, machines, load_profile(profile, graph), graph)
    decision = search(problem, wanted, Budget(seconds=seconds))
    found = advise(problem, wanted) if advice else ()
    figures = bill(problem, wanted, decision.prediction)
    sentences = explain(problem, decision, found)
    output.heading("Plan")
    output.sentences(sentences)
    output.heading("Prediction")
    output.show(text.prediction_table(decision.prediction.summary))
    output.sentences([explain_bill(figures)])
    if out:
        save(out, decision.prediction.plan)
        output.show_text(f"\n  plan written to {out}")
    output.finish({"plan": to_plain(decision.prediction.plan), "summary": to_plain(decision.prediction.summary),
                   "bill": to_plain(figures), "advice": to_plain(found), "explanation": list(sentences)})


def graph_of(job: Job) -> Graph:
    """The analytic graph where the builder knows the model, else the captured one (which needs torch)."""
    from atoll.graph.build import build_graph
    from atoll.plan.job import PRECISIONS

    compute = PRECISIONS[job.precision].compute
    known = build_graph(job.model, job.sequence_length, compute)
    if known is not None:
        return known
    from atoll.runtime.capture import capture

    return capture(job.model, job.sequence_length, 1, compute).graph


def _job(path: Path | None, model: str | None, tokens: str | None, sequence_length: int | None, global_batch: int | None,
         precision: str | None) -> Job:
    """The job of the file, or one made from the options."""
    from atoll.errors import DocumentError
    from atoll.plan.job import EvaluationSpec
    from atoll.planner.problem import longest_sequence, named_model, with_vocabulary
    from atoll.units import Count

    if (path is None) == (model is None):
        raise DocumentError("atoll plan: give either a job.yaml or --model with --tokens")
    if path is not None:
        options = {"--tokens": tokens, "--sequence-length": sequence_length, "--global-batch": global_batch,
                   "--precision": precision}
        given = [option for option, value in options.items() if value is not None]
        if given:
            raise DocumentError(f"atoll plan: {' and '.join(given)} cannot be given with a job; write it into {path} instead")
        return with_vocabulary(load_job(path))
    assert model is not None
    if tokens is None:
        raise DocumentError("atoll plan: --model needs --tokens, such as --tokens 10B")
    spec = named_model(model)
    length = sequence_length or min(longest_sequence(spec), 4096)
    try:
        count = Count(Count.parse(tokens))
    except ValueError as error:
        raise DocumentError(f"atoll plan --tokens: {error}") from None
    batch = global_batch or 1 << max(0, (2**19 // length).bit_length() - 1)
    return Job(name="plan", model=spec, sequence_length=length, global_batch=batch, tokens=count, precision=precision or "bf16",
               evaluation=EvaluationSpec(samples=batch))
