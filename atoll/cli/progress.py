"""A run as it goes: a bar with loss, tokens/s and time left, and a line for everything else that happens."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from atoll.plan.job import Job
from atoll.runtime.events import Began, Came, Evaluated, RunEvent, Saved, StepEnded, Waiting
from atoll.units import format_duration

if TYPE_CHECKING:
    from atoll.cli.common import Output

__all__ = ["Progress", "sentence_of"]

_PLAIN_LINES = 12
"""Steps reported in a run that no terminal watches."""


class Progress:
    """Shows run events; on a terminal with a bar, elsewhere with a line now and then."""

    def __init__(self, output: Output, job: Job) -> None:
        self.output, self.job = output, job
        self.console = output.console
        self.bar = Bar(TextColumn("  step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[figures]}"),
                       TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("train", total=job.total_steps, figures="")
        self.every = max(1, job.total_steps // _PLAIN_LINES)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def note(self, event: RunEvent) -> None:
        if isinstance(event, StepEnded):
            self._step(event)
        else:
            self._say(sentence_of(event))

    def _say(self, text: str) -> None:
        if not self.output.as_json:
            self.bar.console.print(Padding(Text(text), (0, 0, 0, 2)))

    def _step(self, event: StepEnded) -> None:
        rate = event.tokens / event.duration_ns * 1e9 if event.duration_ns else 0.0
        figures = f"loss {event.loss:.4f}  {rate:,.0f} tokens/s  {format_duration(event.duration_ns)} a step"
        self.bar.update(self.task, completed=event.step + 1, figures=figures)
        if not event.committed:
            self._say(f"step {event.step} was not committed: a loss or a gradient was not finite; weights stay as they were")
        if not self.console.is_terminal and ((event.step + 1) % self.every == 0 or event.step + 1 == event.total):
            left = (event.total - event.step - 1) * event.duration_ns
            self._say(f"step {event.step + 1}/{event.total}  {figures}  about {format_duration(left)} left")


def sentence_of(event: RunEvent) -> str:
    """What happened, for people."""
    if isinstance(event, Evaluated):
        return f"after step {event.step}: validation loss {event.loss:.4f}"
    if isinstance(event, Saved):
        return f"after step {event.step}: checkpoint {event.path}"
    if isinstance(event, Waiting):
        return (f"waiting for {event.worker}: copy {event.bundle} to {event.machine} and run there, beside it: "
                f"atoll worker {event.worker} --cluster cluster.yaml")
    if isinstance(event, Came):
        return f"{event.worker} is here"
    if isinstance(event, Began):
        return f"all are ready; {event.times.sentence()}"
    return type(event).__name__
