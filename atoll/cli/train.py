"""``atoll train`` and ``atoll worker``: plan, predict, run, compare, report."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.common import JsonOption, Output, load_job, printable

if TYPE_CHECKING:
    from atoll.cli.session import Prepared
    from atoll.cluster.calibration import Profile
    from atoll.plan.job import Job
    from atoll.plan.plan import Plan
    from atoll.planner.predict import Prediction
    from atoll.planner.times import Problem
    from atoll.runtime.checkpoint.store import Checkpoint
    from atoll.runtime.driver import RunResult
    from atoll.runtime.rendezvous import Rendezvous

__all__ = ["train", "worker"]


def train(
    job: Annotated[Path, typer.Argument(help="job.yaml")],
    cluster: Annotated[Path | None, typer.Option("--cluster", "-c", help="cluster.yaml (left out: this machine).")] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.yaml to run as it is (left out: the planner makes one).")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Folder of the run (default: runs/NAME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest sound checkpoint in --run.")] = False,
    machine: Annotated[str | None, typer.Option(help="Which machine of the cluster this is.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to search for a plan.", min=0)] = 4.0,
    as_json: JsonOption = False,
) -> None:
    """Train: plan, predict, run, lay the prediction over what happened, write the report.

    Real machines: this runs on one; on each other machine run the line it prints (atoll worker NAME ...).

    Example:  atoll train examples/demo/job.yaml --cluster examples/demo/cluster.yaml
    """
    from atoll.cli.session import (
        check_folder,
        check_port,
        choose_folder,
        first_look,
        head_machine,
        measure_devices,
        prepare_run,
        this_machine,
    )
    from atoll.cluster.network import load_cluster
    from atoll.errors import DocumentError
    from atoll.plan.job import PRECISIONS
    from atoll.planner.search import microbatches
    from atoll.planner.times import Problem
    from atoll.report import text

    output = Output(as_json)
    wanted = load_job(job)
    if resume and run is None:
        raise DocumentError("--resume: name the run to go on with: --run runs/NAME")
    folder = choose_folder(wanted.name, run)
    check_folder(folder, resume)
    machines = load_cluster(cluster) if cluster else this_machine()
    head = head_machine(machines, machine)
    check_port(machines, head)
    given, notes = first_look(wanted, machines, plan)
    output.heading("Cluster")
    output.show(text.cluster_table(machines))
    output.heading("Job")
    from atoll.runtime.launch import find_checkpoint  # torch, late: a wrong document is refused at once

    say = output.say
    prepared = prepare_run(wanted, machines, folder, job.absolute().parent, say)
    checkpoint = find_checkpoint(folder, prepared.job, prepared.packed) if resume else None
    if checkpoint is not None and checkpoint.facts.step >= wanted.total_steps:
        raise DocumentError(f"--resume: {folder} has done {checkpoint.facts.step} steps and the job asks for "
                            f"{wanted.total_steps}; raise job.steps to go on, or look at it with: atoll report {folder}")
    with _said_in_words(folder, checkpoint), _called(output, prepared, given, folder, head, checkpoint) as rendezvous:
        sizes = tuple(microbatches(prepared.job)) if given is None else (given.microbatch_samples,)
        profile = measure_devices(prepared, head, sizes, rendezvous, say)
        problem = Problem(prepared.graph, machines, PRECISIONS[prepared.job.precision], profile)
        prediction, sentences = _decide(problem, prepared.job, given, notes, seconds)
        output.heading("Plan")
        output.sentences(sentences)
        output.heading("Prediction")
        output.show(text.prediction_table(prediction.summary))
        _keep(folder, prepared, profile, prediction, sentences)
        result = _run(output, prepared, prediction.plan, folder, head, checkpoint, job.absolute().parent, rendezvous)
    _afterwards(output, folder, prepared, result)


@contextlib.contextmanager
def _called(output: Output, prepared: Prepared, given: Plan | None, folder: Path, head: str,
            checkpoint: Checkpoint | None) -> Iterator[Rendezvous | None]:
    """The workers of real machines (of ``given``, else all), called together before anything is planned, so that each can
    measure its own device; None for an emulated cluster, which is measured here."""
    from atoll.cli.progress import sentence_of
    from atoll.cluster.network import Network
    from atoll.runtime.events import RunEvent
    from atoll.runtime.launch import METRICS
    from atoll.runtime.rendezvous import Rendezvous

    if prepared.cluster.emulation is not None:
        yield None
        return

    def note(event: RunEvent) -> None:
        output.say(sentence_of(event))

    workers = tuple(Network(prepared.cluster).workers) if given is None else given.workers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).touch()  # empty: a run that has not begun, whose folder may be used again
    offered = [] if checkpoint is None else [checkpoint.folder]
    with Rendezvous(prepared.cluster, workers, head, folder, int(prepared.job.max_pause), note, offered) as rendezvous:
        rendezvous.open()
        yield rendezvous


def _decide(problem: Problem, job: Job, given: Plan | None, notes: tuple[str, ...],
            seconds: float) -> tuple[Prediction, tuple[str, ...]]:
    from atoll.planner.advice import advise
    from atoll.planner.explain import explain, explain_plan
    from atoll.planner.predict import predict
    from atoll.planner.search import Budget, search

    if given is not None:
        prediction = predict(problem, given, steps=3)
        return prediction, (*notes, *explain_plan(problem, prediction, chosen=False))
    decision = search(problem, job, Budget(seconds=seconds))
    return predict(problem, decision.prediction.plan, steps=3), explain(problem, decision, advise(problem, job))


def _keep(folder: Path, prepared: Prepared, profile: Profile, prediction: Prediction, sentences: tuple[str, ...]) -> None:
    """What was wanted, what exists, what was decided and predicted: beside the run."""
    import json

    from atoll.records import save, to_plain, write_atomically
    from atoll.trace.files import write_trace

    save(folder / "job.yaml", prepared.job)
    save(folder / "cluster.yaml", prepared.cluster)
    save(folder / "plan.yaml", prediction.plan)
    write_atomically(folder / "profile.json", json.dumps(to_plain(profile)))
    write_atomically(folder / "explain.txt", "\n".join(sentences) + "\n")
    write_atomically(folder / "summary.json", json.dumps(to_plain(prediction.summary), indent=1))
    write_atomically(folder / "predicted.memory.json", json.dumps(
        {name: [list(point) for point in curve] for name, curve in prediction.simulation.memory_curves().items()}))
    write_trace(folder / "predicted.trace.jsonl", prediction.simulation.trace())


def _run(output: Output, prepared: Prepared, plan: Plan, folder: Path, head: str, checkpoint: Checkpoint | None,
         base: Path, rendezvous: Rendezvous | None) -> RunResult:
    from atoll.cli.progress import Progress
    from atoll.runtime.launch import launch

    output.heading("Run")
    if checkpoint is not None:
        output.sentences([*checkpoint.notes, f"going on after step {checkpoint.facts.step} of {prepared.job.total_steps}"])
    with Progress(output, prepared.job) as progress:
        return launch(prepared.job, prepared.cluster, plan, prepared.graph, prepared.packed, folder, head=head,
                      on_event=progress.note, resume=checkpoint, base=base, rendezvous=rendezvous)


@contextlib.contextmanager
def _said_in_words(folder: Path, checkpoint: Checkpoint | None) -> Iterator[None]:
    """What ended the run, with what is left of it."""
    from atoll.errors import InterruptError, PlanError, WorkerLostError, WorkplaceError

    try:
        with _terminated_as_interrupted():
            yield
    except KeyboardInterrupt:
        raise InterruptError(f"interrupted; {_what_is_left(folder)}") from None
    except (PlanError, WorkplaceError):  # a port that was taken meanwhile, nobody who came
        if checkpoint is None and not _begun(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except WorkerLostError as error:
        raise WorkerLostError(f"{error}; {_what_is_left(folder)}") from None


def _begun(folder: Path) -> bool:
    from atoll.runtime.launch import METRICS

    return (folder / METRICS).exists() and (folder / METRICS).stat().st_size > 0


def _what_is_left(folder: Path) -> str:
    from atoll.runtime.checkpoint.store import steps
    from atoll.runtime.checkpoint.trained import CHECKPOINTS

    saved = steps(folder / CHECKPOINTS)
    if not saved:
        return f"nothing was saved yet (job.checkpoint.every); atoll report {folder} shows what was done"
    return f"the last checkpoint is after step {saved[0]}: go on with --resume --run {folder}"


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A request to end (SIGTERM, of a scheduler or a shutdown) ends the run in order, as Ctrl-C does."""
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _afterwards(output: Output, folder: Path, prepared: Prepared, result: RunResult) -> None:
    """Measured beside predicted, a sample, the report."""
    from atoll.report import text
    from atoll.report.compare import compare
    from atoll.report.page import write_report
    from atoll.trace.files import read_trace

    comparison = compare(read_trace(folder / "predicted.trace.jsonl"), read_trace(folder / "trace.jsonl"))
    output.heading("Measured beside predicted")
    output.show(text.comparison_table(comparison))
    sample = _sample(output, folder, prepared.job) if prepared.job.sample is not None and result.saved >= 0 else None
    paths = write_report(folder)
    output.heading("Report")
    output.show_text(f"  {paths.html}\n  timeline {paths.timeline_png}\n  for ui.perfetto.dev {paths.perfetto_json}")
    output.finish(_as_plain(folder, result, comparison, sample, paths))


def _sample(output: Output, folder: Path, job: Job) -> str | None:
    """The prompt of the job continued; what stands in the way is said, and the report still comes."""
    from atoll.errors import AtollError
    from atoll.runtime.generate import generate

    output.heading("Sample of the trained model")
    try:
        text = generate(folder, job.sample or "", tokens=120, seed=job.seed)
    except AtollError as error:
        output.sentences([str(error)])
        return None
    output.show_text(printable(text))
    return text


def _as_plain(folder: Path, result: RunResult, comparison: Any, sample: str | None, paths: Any) -> dict[str, Any]:
    from atoll.records import to_plain

    return {"run": str(folder), "losses": list(result.losses), "step_ns": list(result.step_ns),
            "evaluations": [list(pair) for pair in result.evaluations], "tokens": result.tokens, "saved": result.saved,
            "comparison": to_plain(comparison), "sample": sample, "report": to_plain(paths)}


def worker(
    name: Annotated[str, typer.Argument(help="Worker of the cluster: the machine's name, or NAME:0, NAME:1, ... .")],
    cluster: Annotated[Path | None, typer.Option("--cluster", "-c", help="cluster.yaml (to check the name by).")] = None,
    keys: Annotated[Path | None, typer.Option(
        help="This machine's bundle, made by atoll train for this run (default: MACHINE.pem, here or with --cluster).")] = None,
    head: Annotated[str, typer.Option(help="host:port of the machine that trains (default: as the bundle says).")] = "",
    home: Annotated[Path, typer.Option(help="Where this worker keeps its shards and data.")] = Path("runs/worker"),
    as_json: JsonOption = False,
) -> None:
    """Take part in a run that another machine started with atoll train; the line to type is printed there.

    Example:  atoll worker b1 --cluster cluster.yaml
    """
    from atoll.cluster.network import Network, load_cluster
    from atoll.runtime.keys import read_bundle

    if cluster is not None:
        Network(load_cluster(cluster)).worker(name)
    keys = keys or _own_bundle(name.partition(":")[0], cluster)
    bundle = read_bundle(keys)
    home.mkdir(parents=True, exist_ok=True)
    output, said = Output(as_json), list[str]()
    output.show_text(f"worker {name}: calling the head at {head or bundle.head_address} ...")
    from atoll.runtime.assembly import assemble  # torch, late
    from atoll.runtime.measuring import measure
    from atoll.runtime.worker import leave, run_worker

    code = run_worker(name, head, keys, assemble, measure, home=home, say=said.append)
    for sentence in said:
        print(f"atoll: {sentence}", file=sys.stderr)
    output.finish({"worker": name, "exit_code": code, "said": said})
    if code == 0:
        output.show_text(f"worker {name}: done")
    leave(code)


def _own_bundle(machine: str, cluster: Path | None) -> Path:
    from atoll.errors import WorkplaceError
    from atoll.runtime.keys import bundle_path

    folders = [Path(), *([] if cluster is None else [cluster.parent])]
    found = [path for folder in folders if (path := bundle_path(folder, machine)).exists()]
    if not found:
        where = f"here or beside {cluster}" if cluster else "here"
        raise WorkplaceError(f"there is no {machine}.pem {where}; copy the one that atoll train made for this run (in keys/ of "
                             "its folder), or say where it is with --keys")
    return found[0]
