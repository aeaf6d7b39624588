"""What a step costs besides its operators: vote, update, sums of buffers, and the fixed cost of an instruction.

Measured with the kernels that the run uses, on weights of the model itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from atoll.errors import ProgramError
from atoll.policies.optim.spec import OptimizerSpec
from atoll.program.program import Bucket
from atoll.runtime.kernels.optimizers import optimizer
from atoll.runtime.state import ParameterStore, sum_of_squares
from atoll.runtime.world import StageModule
from atoll.trace.span import Span

__all__ = ["FixedCosts"]

_ELEMENTS = 1 << 21

Clock = Callable[[], int]


class _Weights:
    """A stage that is nothing but its parameters (the ``StageModule`` protocol)."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise ProgramError("these weights have no operators")

    def start_deferring(self) -> list[object]:
        raise ProgramError("these weights have no operators")

    def stop_deferring(self) -> None:
        raise ProgramError("these weights have no operators")

    def run_deferred(self, deferred: list[object]) -> None:
        raise ProgramError("these weights have no operators")


def _some(stages: Sequence[StageModule]) -> dict[str, torch.nn.Parameter]:
    """Parameters of as many stages as come to about two million elements: enough to leave the caches nearest the core."""
    found: dict[str, torch.nn.Parameter] = {}
    elements = 0
    for stage in stages:
        if elements >= _ELEMENTS:
            break
        fresh = {name: leaf for name, leaf in stage.parameters.items() if leaf.requires_grad and name not in found}
        found.update((name, torch.nn.Parameter(leaf.detach().clone())) for name, leaf in fresh.items())
        elements += sum(leaf.numel() for leaf in fresh.values())
    return found


class FixedCosts:
    """Call ``measure`` once after every microbatch of the profile; the figures are medians over the calls but the first.

    Once, because a step does all this once: a second time in a row, weights and code would lie in the caches already, which
    makes the update look up to three times faster than it is.
    """

    def __init__(self, stages: Sequence[StageModule], master: str, device: torch.device, clock: Clock) -> None:
        parameters = _some(stages)
        self.elements = sum(leaf.numel() for leaf in parameters.values())
        bucket = Bucket(index=0, parameters=tuple(parameters), elements=self.elements, chunks=1, holders=("here",))
        self._store = ParameterStore({0: _Weights(parameters)}, [bucket], getattr(torch, master))
        self._kernel = optimizer(self._store, OptimizerSpec())
        self._device, self._clock = device, clock
        self._parts = [torch.ones(_ELEMENTS // 4, dtype=getattr(torch, master)) for _ in range(3)]
        self._times: dict[str, list[int]] = {}

    def measure(self) -> None:
        """One of each."""
        self._time("launch", self._pass)
        self._time("vote", self._vote)
        self._time("reduce", self._reduce)
        self._time("update", self._update)

    def _time(self, what: str, action: Callable[[], object]) -> None:
        started = self._clock()
        action()
        self._times.setdefault(what, []).append(self._clock() - started)

    def _pass(self) -> None:
        """A stage's pass that has nothing to do: a leaf made, one operator, a backward, two spans written."""
        leaf = torch.zeros(1, device=self._device).requires_grad_()
        out = leaf * 1.0
        torch.autograd.backward([out], [torch.ones_like(out)])
        for name in ("0F0", "0B0"):
            Span(worker="here", step=0, instruction=0, name=name, lane="compute", start_ns=0, end_ns=self._clock())

    def _vote(self) -> torch.Tensor:
        squares = sum(float(sum_of_squares(flat)) for flat in self._store.flats.values())
        return torch.tensor([squares, 0.0, 0.0, not math.isfinite(squares)], dtype=torch.float64)

    def _reduce(self) -> None:
        torch.add(self._parts[0], self._parts[1], out=self._parts[2])

    def _update(self) -> None:
        self._store.scale(0.5)
        self._kernel.update(1e-9)
        self._store.publish()
        self._store.clear()

    def _median(self, what: str) -> float:
        return statistics.median(self._times[what][1:])

    @property
    def launch_ns(self) -> int:
        """Fixed cost of an instruction: half of a pass, which is a forward and a backward."""
        return round(self._median("launch") / 2)

    @property
    def update_ns_per_element(self) -> float:
        """Gradients scaled by the clipped norm, the update rule, weights published, gradients cleared for the next step."""
        return self._median("update") / max(1, self.elements)

    @property
    def vote_ns_per_byte(self) -> float:
        """Sum of squares of the gradients."""
        held = sum(flat.nbytes for flat in self._store.flats.values())
        return self._median("vote") / max(1, held)

    @property
    def reduce_ns_per_byte(self) -> float:
        """Two host buffers added into a third, per byte read."""
        return self._median("reduce") / (2 * self._parts[0].nbytes)
