"""Group traced operations into the operators of a ``Graph``.

Rules, in this order; all are functions of the trace alone, so that every worker finds the same operators.

1. *Free* operations depend on no parameter (positions, masks, cos and sin tables, reshaped targets). They belong to no
   operator: every stage that needs one computes it again instead of receiving it, so that only what was learned from
   crosses a cut. Those that depend on no model input either are *constants*: a stage computes them once.
2. Consecutive operations run by one module are one operator; a run is also broken after an operation that multiplies
   matrices (layout changes right behind it stay), so that functional code can be cut too.
3. A run that only changes layout (views, transposes, copies to contiguous) joins the operator before it.
4. The operator is named after its module; a second visit gets "#2"; code of the outermost module is called "forward", and
   the operator that makes the loss is called "loss". Its tensors are named after it, the second is ":1".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from atoll.errors import GraphError
from atoll.graph.graph import Graph, Operator, ParameterSpec, TensorSpec
from atoll.runtime.capture.costs import NodeCost, measure
from atoll.runtime.capture.export import Traced, at_samples, is_getitem, is_number, module_path

__all__ = ["Layout", "arrange"]

_aten = torch.ops.aten
_VIEWS = frozenset({
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "contiguous", "flatten", "unflatten", "slice",
    "select", "split", "split_with_sizes", "chunk", "unbind", "t", "numpy_T", "clone", "movedim", "swapaxes", "narrow", "alias",
    "view_as", "expand_as", "_unsafe_view", "unsafe_split", "unsafe_chunk", "as_strided", "diagonal", "mT", "tile_view",
})
_KINDS = (("attention", ("scaled_dot_product_attention",)),
          ("convolution", ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
                           "conv_transpose2d", "conv_transpose3d")),
          ("embedding", ("embedding", "embedding_bag")),
          ("norm", ("layer_norm", "rms_norm", "group_norm", "native_layer_norm", "rsqrt", "batch_norm", "instance_norm")))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a graph's records come from: nodes per operator, the node behind each tensor, what is free or constant."""

    graph: Graph
    runs: tuple[tuple[fx.Node, ...], ...]
    tensors: dict[str, fx.Node]
    free: frozenset[fx.Node]
    constants: frozenset[fx.Node]
    gradients: frozenset[fx.Node]


def arrange(traced: Traced, name: str, prefix: str, sequence_length: int) -> Layout:
    """Return the graph of ``traced`` and how its operators are made of traced nodes."""
    parameters, inputs = frozenset(traced.parameters), frozenset(traced.inputs)
    learned = _reached(traced.nodes, parameters)
    if traced.loss not in learned:
        raise GraphError(f"model {name}: its loss depends on no parameter, so there is nothing to train; return the loss that "
                         "forward computes from its weights")
    fed = _reached(traced.nodes, inputs)
    free = frozenset(node for node in traced.nodes if node not in learned)
    constants = frozenset(node for node in free if node not in fed)
    costs = measure(traced, constants, frozenset(node for node in learned if node not in fed))
    runs = _runs([node for node in traced.nodes if node not in free], costs, prefix)
    names = _names(runs, traced.loss, prefix)
    owner = {node: index for index, run in enumerate(runs) for node in run}
    written = _outputs(runs, owner, traced.loss)
    tensors = {(f"{names[index]}:{number}" if number else names[index]): node
               for index, nodes in enumerate(written) for number, node in enumerate(nodes)}
    label = {node: tensor for tensor, node in tensors.items()}
    operators = tuple(_operator(names[index], run, traced, costs, owner, index, label, written[index])
                      for index, run in enumerate(runs))
    graph = Graph(name=name, sequence_length=sequence_length, source="captured", operators=operators, loss=label[traced.loss],
                  inputs=tuple(_tensor(traced.inputs[node], node) for node in traced.inputs),
                  parameters=_parameters(traced))
    return Layout(graph=graph, runs=tuple(map(tuple, runs)), tensors=tensors, free=free, constants=constants,
                  gradients=frozenset(node for node, cost in costs.items() if cost.gradient))


def _reached(nodes: Iterable[fx.Node], sources: frozenset[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on any of ``sources``."""
    reached: set[fx.Node] = set()
    for node in nodes:
        if any(argument in sources or argument in reached for argument in node.all_input_nodes):
            reached.add(node)
    return reached


def _own_path(node: fx.Node, prefix: str) -> str:
    """The module path in the user's own model; the wrapper around it is "", its outermost module "forward"."""
    path = module_path(node)
    if prefix and path:
        return "forward" if path == prefix.rstrip(".") else path.removeprefix(prefix)
    return path if path or prefix else "forward"


def _is_layout(node: fx.Node) -> bool:
    return is_getitem(node) or str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2] in _VIEWS


def _runs(nodes: list[fx.Node], costs: dict[fx.Node, NodeCost], prefix: str) -> list[list[fx.Node]]:
    runs: list[list[fx.Node]] = []
    path, closed = None, False
    for node in nodes:
        own = _own_path(node, prefix)
        stays = is_getitem(node) or (own == path and (not closed or _is_layout(node)))
        if runs and stays:
            runs[-1].append(node)
        else:
            runs.append([node])
            path, closed = own, False
        closed = closed or costs[node].forward_flops > 0
    joined: list[list[fx.Node]] = []
    for run in runs:
        before = joined[-1] if joined else None
        if before is not None and (all(map(_is_layout, run)) or (
                _run_path(before, prefix) == _run_path(run, prefix) and not any(costs[node].forward_flops for node in before))):
            before.extend(run)
        else:
            joined.append(list(run))
    if len(joined) > 1 and all(map(_is_layout, joined[0])):
        joined[1][:0] = joined.pop(0)
    return joined


def _run_path(run: list[fx.Node], prefix: str) -> str:
    """The path of a run is that of its first operation that does more than change layout."""
    return next((_own_path(node, prefix) for node in run if not _is_layout(node)), _own_path(run[0], prefix))


def _names(runs: list[list[fx.Node]], loss: fx.Node, prefix: str) -> list[str]:
    paths = ["loss" if loss in run else _run_path(run, prefix) or "forward" for run in runs]
    visits: dict[str, int] = {}
    names = []
    for path in paths:
        visits[path] = visits.get(path, 0) + 1
        names.append(path if visits[path] == 1 else f"{path}#{visits[path]}")
    return names


def _outputs(runs: list[list[fx.Node]], owner: dict[fx.Node, int], loss: fx.Node) -> list[list[fx.Node]]:
    """Per operator, the nodes that later operators read (and the loss), in order."""
    wanted = {argument for node in owner for argument in node.all_input_nodes
              if argument in owner and owner[argument] != owner[node]}
    wanted.add(loss)
    return [[node for node in run if node in wanted] for run in runs]


def _operator(name: str, run: list[fx.Node], traced: Traced, costs: dict[fx.Node, NodeCost], owner: dict[fx.Node, int],
              index: int, label: dict[fx.Node, str], written: list[fx.Node]) -> Operator:
    inputs: dict[str, None] = {}
    parameters: set[str] = set()
    pending = [argument for node in run for argument in node.all_input_nodes][::-1]
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen or owner.get(node) == index or is_number(node):
            continue
        seen.add(node)
        if node in traced.parameters:
            parameters.add(traced.parameters[node])
        elif node in traced.inputs:
            inputs[traced.inputs[node]] = None
        elif node in owner:
            inputs[label[node]] = None
        else:
            pending.extend(reversed(node.all_input_nodes))  # through what is free to the model inputs it reads
    sums: dict[str, int] = {field: sum(getattr(costs[node], field) for node in run) for field in (
        "forward_flops", "backward_input_flops", "backward_weight_flops", "saved_bytes", "read_bytes", "written_bytes")}
    return Operator(name=name, kind=_kind(run, traced.loss, sums["forward_flops"]), inputs=tuple(inputs),
                    outputs=tuple(_tensor(label[node], node) for node in written),
                    parameters=tuple(name for name in traced.origins if name in parameters), **sums)


def _kind(run: list[fx.Node], loss: fx.Node, flops: int) -> str:
    if loss in run:
        return "loss"
    kinds = {str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2] for node in run}
    for kind, targets in _KINDS:
        if kinds & set(targets):
            return kind
    return "matmul" if flops else "elementwise"


def _tensor(name: str, node: fx.Node) -> TensorSpec:
    value: Any = node.meta["val"]
    one, two = (tuple(at_samples(size, samples) for size in value.shape) for samples in (1, 2))
    return TensorSpec(name=name, shape=one, dtype=str(value.dtype).removeprefix("torch."), batched=one != two)


def _parameters(traced: Traced) -> tuple[ParameterSpec, ...]:
    nodes = {name: node for node, name in traced.parameters.items()}
    return tuple(ParameterSpec(name=name, shape=tuple(nodes[name].meta["val"].shape), aliases=traced.aliases[name],
                               dtype=str(nodes[name].meta["val"].dtype).removeprefix("torch."))
                 for name in traced.origins if name in nodes and _used(nodes[name]))


def _used(node: fx.Node) -> bool:
    return bool(node.users)
