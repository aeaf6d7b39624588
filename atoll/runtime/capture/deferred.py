"""Build a module without memory, remember how each tensor came to be, and make single tensors real later.

Everything a constructor creates lies on the ``meta`` device (shapes, no data); a ``Tape`` writes down the operations.
``Tape.value`` replays just those that one tensor depends on. So a weight gets exactly the distribution the module's own
``__init__`` gives it (``reset_parameters``, ``nn.init``, Hugging Face's ``_init_weights``), each under a seed of its own,
and a worker that holds one layer of a 70B model never touches the other layers. The idea of replaying a recorded
construction is that of torchdistX deferred initialisation (Meta, 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from atoll.errors import GraphError

__all__ = ["Tape", "deferred"]

_aten = torch.ops.aten
_OVERWRITES = frozenset({_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.copy_.default,
                         _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.random_.default, _aten.exponential_.default})
_READS_BACK = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default})


@dataclass(frozen=True, slots=True)
class _Place:
    """A meta tensor as a window on a storage: replaying needs no other identity."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    whole: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: frozenset[int]
    creates: tuple[_Place | None, ...]
    writes: frozenset[int]
    overwrites: bool


class Tape(TorchDispatchMode):
    """All operations on meta tensors since it was entered. Read only once the construction is over."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[_Entry] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that an identity is never used twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)]
        if function in _READS_BACK and tensors:
            return function(*tree_map(self._real, args), **tree_map(self._real, kwargs))
        result = function(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs)) if tensors else function(*args, **kwargs)
        outputs = result if isinstance(result, list | tuple) else (result,)
        if tensors or any(_is_meta(output) for output in outputs):
            self._record(function, args, kwargs, tensors, outputs)
        return result

    def _record(self, function: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], outputs: Any) -> None:
        schema = function._schema
        by_name = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        changed = [by_name[argument.name] for argument in schema.arguments
                   if argument.is_write and argument.name in by_name]
        changed = [leaf for leaf in tree_leaves(changed) if _is_meta(leaf)]
        reads = {self._place(tensor).storage for tensor in tensors}
        created = tuple(self._place(output) if _is_meta(output) else None for output in outputs)
        fresh = {place.storage for place in created if place is not None} - reads
        if not changed and not fresh:
            return  # a view: places know their geometry themselves
        overwrites = function in _OVERWRITES and self._place(changed[0]).whole
        if overwrites:
            reads -= {self._place(changed[0]).storage}
        self._entries.append(_Entry(
            function=function, args=tree_map(self._symbol, args), kwargs=tree_map(self._symbol, kwargs),
            reads=frozenset(reads), overwrites=overwrites,
            creates=tuple(place if place is not None and place.storage in fresh else None for place in created),
            writes=frozenset({self._place(tensor).storage for tensor in changed} | fresh)))

    def note(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Write down that ``function`` fills ``tensor``; used for initialisers that do nothing on meta tensors."""
        place = self._place(tensor)
        self._entries.append(_Entry(function=function, args=(place, *args), kwargs=kwargs, reads=frozenset(), creates=(),
                                    writes=frozenset({place.storage}), overwrites=place.whole))
        return tensor

    def _place(self, tensor: torch.Tensor) -> _Place:
        storage = tensor.untyped_storage()
        identity: int = storage._cdata
        self._storages.setdefault(identity, storage)
        whole = tensor.storage_offset() == 0 and tensor.is_contiguous() and (
            tensor.numel() * tensor.element_size() == storage.nbytes())
        return _Place(identity, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, whole)

    def _symbol(self, leaf: Any) -> Any:
        if _is_meta(leaf):
            return self._place(leaf)
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return torch.device("cpu")
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    def _real(self, leaf: Any) -> Any:
        return self.value(leaf) if _is_meta(leaf) else leaf

    def value(self, tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """What ``tensor`` (meta, made under this tape) would hold, on the CPU, its random numbers drawn from ``seed``.

        Raises ``GraphError`` when nothing on the tape ever wrote it.
        """
        place = self._place(tensor)
        needed, chosen = {place.storage}, []
        for entry in reversed(self._entries):
            if needed & entry.writes:
                chosen.append(entry)
                if entry.overwrites or any(entry.creates):
                    needed -= entry.writes
                needed |= entry.reads
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.utils._python_dispatch._disable_current_modes():
            torch.manual_seed(seed)
            real: dict[int, torch.UntypedStorage] = {}
            for entry in reversed(chosen):
                self._replay(entry, real)
            return self._window(place, real).clone()

    def _replay(self, entry: _Entry, real: dict[int, torch.UntypedStorage]) -> None:
        def leaf_value(leaf: Any) -> Any:
            return self._window(leaf, real) if isinstance(leaf, _Place) else leaf

        def is_leaf(leaf: Any) -> bool:
            return isinstance(leaf, _Place)

        result = entry.function(*tree_map(leaf_value, entry.args, is_leaf=is_leaf),
                                **tree_map(leaf_value, entry.kwargs, is_leaf=is_leaf))
        outputs = result if isinstance(result, list | tuple) else (result,)
        for place, output in zip(entry.creates, outputs, strict=False):
            if place is not None:
                if tuple(output.stride()) != place.stride or output.storage_offset() != place.offset:
                    raise GraphError(f"the initial value of a tensor of shape {list(place.shape)} cannot be replayed: "
                                     f"{entry.function} lays it out differently on the CPU; give the weights in a folder")
                real[place.storage] = output.untyped_storage()

    def _window(self, place: _Place, real: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if place.storage not in real:
            real[place.storage] = torch.UntypedStorage(self._storages[place.storage].nbytes())
        return torch.empty(0, dtype=place.dtype).set_(real[place.storage], place.offset, place.shape, place.stride)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"


def _to_meta(leaf: Any) -> Any:
    """Constructors mix tensors they put on the CPU by name with those that went to meta."""
    if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.dim() > 0:
        return leaf.to("meta")
    return leaf


@contextmanager
def _initialisers_noted(tape: Tape) -> Iterator[None]:
    """``torch.nn.init`` returns at once for meta tensors in these; let the tape note the call instead."""
    kept = {name: getattr(torch.nn.init, name) for name in ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")}

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return tape.note(function, tensor, *args, **kwargs) if _is_meta(tensor) else function(tensor, *args, **kwargs)
        return call

    for name, function in kept.items():
        setattr(torch.nn.init, name, noted(function))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.nn.init, name, function)


@contextmanager
def deferred() -> Iterator[Tape]:
    """Inside, tensors are created on ``meta`` and recorded on the tape yielded; the caller's random state is untouched."""
    tape = Tape()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with _initialisers_noted(tape), torch.device("meta"), tape:
            yield tape
