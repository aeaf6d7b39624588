"""Trace a module into one flat list of tensor operations, without weights and for any number of samples.

The module is built on ``meta`` under a tape, its parameters become fake tensors, its buffers real ones, and
``torch.export`` writes down the operations with a symbolic batch axis. What does no work is then taken out.
"""

from __future__ import annotations

import io
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from atoll.errors import GraphError
from atoll.runtime.capture.deferred import Tape, deferred
from atoll.runtime.capture.models import ModelSource

__all__ = ["Traced", "at_samples", "copy_nodes", "is_getitem", "is_number", "module_path", "trace"]

_aten = torch.ops.aten
_DROPOUTS = {_aten.dropout.default: 1, _aten.feature_dropout.default: 1, _aten.alpha_dropout.default: 1,
             _aten.feature_alpha_dropout.default: 1, _aten.native_dropout.default: 1}
_CONVERSIONS = frozenset({_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten._to_copy.default,
                          _aten.type_as.default})
_NORMS_OVER_BATCH = {_aten.batch_norm.default: 5, _aten.native_batch_norm.default: 5, _aten.cudnn_batch_norm.default: 5}


@dataclass(frozen=True, slots=True)
class Traced:
    """``nodes``: operations in the order of execution, cleaned; ``loss``: the last of them. ``placeholders``: what the
    graph reads from outside, by kind: parameter name, buffer value, or model input name. ``origins``: parameter name ->
    meta tensor known to ``tape``. ``aliases``: parameter name -> its other names (tied weights)."""

    graph: fx.Graph
    nodes: tuple[fx.Node, ...]
    loss: fx.Node
    parameters: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, torch.Tensor]
    inputs: Mapping[fx.Node, str]
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, tuple[str, ...]]
    origins: Mapping[str, torch.Tensor]
    tape: Tape


def trace(source: ModelSource, compute_dtype: torch.dtype) -> Traced:
    """Return the operations of ``source``. Costs memory for shapes and buffers only.

    Raises ``GraphError`` when the module cannot be traced for any batch size, draws random numbers (dropout), keeps state
    between calls or mixes the samples of a batch (batch norm), freezes parameters, or does not return one loss.
    """
    with deferred() as tape:
        module = source.build()
    taken = sorted(set(source.inputs).intersection(name for name, _ in module.named_children()))
    if taken:
        raise GraphError(f"model {source.name}: its part {taken[0]!r} bears the name of an input, and tensors are told apart "
                         "by these names; rename the part")
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    origins, aliases = _adopt_parameters(module, source, compute_dtype, fake_mode)
    buffers = _adopt_buffers(module, source, compute_dtype, tape)
    with fake_mode:
        inputs = {name: torch.empty((2 * tensor.shape[0], *tensor.shape[1:]), device="cpu",
                                    dtype=compute_dtype if tensor.is_floating_point() else tensor.dtype)
                  for name, tensor in source.inputs.items()}
    exported = _export(source, module, inputs)
    graph = exported.graph_module.graph
    _check(source, exported, graph)
    parameters: dict[fx.Node, str] = {}
    constants: dict[fx.Node, torch.Tensor] = {}
    given: dict[fx.Node, str] = {}
    canonical = {other: name for name, others in aliases.items() for other in (name, *others)}
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for spec in exported.graph_signature.input_specs:
        node, target = by_name[spec.arg.name], str(spec.target)
        if spec.kind is InputKind.PARAMETER:
            parameters[node] = canonical[target.removeprefix(source.prefix)]
        elif spec.kind is InputKind.BUFFER:
            constants[node] = buffers[target]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[node] = exported.constants[target].detach()
        elif spec.kind is InputKind.USER_INPUT:
            given[node] = spec.arg.name
        else:
            raise GraphError(f"model {source.name}: its input {spec.arg.name!r} is neither a tensor nor a parameter")
    output = next(node for node in graph.nodes if node.op == "output")
    loss = _clean(source, graph, output)
    nodes = tuple(node for node in graph.nodes if node.op == "call_function" and not is_number(node))
    return Traced(graph=graph, nodes=nodes, loss=loss, parameters=parameters, constants=constants, inputs=given,
                  shapes={name: tuple(tensor.shape) for name, tensor in source.inputs.items()}, aliases=aliases,
                  origins=origins, tape=tape)


def _adopt_parameters(module: nn.Module, source: ModelSource, dtype: torch.dtype, mode: FakeTensorMode,
                      ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, ...]]]:
    """Put a fake parameter of the compute dtype in the place of each (tied ones stay tied)."""
    origins: dict[str, torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    fakes: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not parameter.requires_grad:
            raise GraphError(f"model {source.name}: parameter {name!r} is frozen, which is not supported; "
                             "make it a buffer or let it train")
        key = id(parameter)
        if key not in fakes:
            origins[name.removeprefix(source.prefix)] = parameter
            with mode:
                fakes[key] = nn.Parameter(torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device="cpu"))
        names.setdefault(key, []).append(name.removeprefix(source.prefix))
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = fakes[key]
    return origins, {first: tuple(rest) for first, *rest in names.values()}


def _adopt_buffers(module: nn.Module, source: ModelSource, dtype: torch.dtype, tape: Tape) -> dict[str, torch.Tensor]:
    """Make buffers, and tensors kept as plain attributes, real: they are small and their values are part of the model."""
    def real(tensor: torch.Tensor) -> torch.Tensor:
        value = tape.value(tensor) if tensor.device.type == "meta" else tensor
        return value.to(dtype) if source.cast_buffers and value.is_floating_point() else value

    values: dict[str, torch.Tensor] = {}
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = values[f"{path}.{name}" if path else name] = real(buffer)
        for name, value in list(vars(owner).items()):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                setattr(owner, name, real(value))
    return values


def _export(source: ModelSource, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.export.ExportedProgram:
    dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in inputs}
    noise = io.StringIO()  # a failing export prints its whole half-made graph
    try:
        with redirect_stderr(noise):
            exported = torch.export.export(module, (), kwargs=inputs, dynamic_shapes=dynamic, strict=False)
        sys.stderr.write(noise.getvalue())
        if any(node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
               and node.target._schema.is_mutable for node in exported.graph.nodes):
            _check(source, exported, exported.graph)
            exported = exported.run_decompositions({})
    except GraphError:
        raise
    except Exception as error:  # torch.export raises its own many kinds; the user needs the model's name and the first line
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise GraphError(f"model {source.name}: torch.export cannot trace it for any number of samples: "
                         f"{first[0][:300]}; remove branches on tensor values and on the batch size") from error
    return exported


def _check(source: ModelSource, exported: torch.export.ExportedProgram, graph: fx.Graph) -> None:
    """Refuse what would make the result depend on how the batch or the model is cut."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        where = module_path(node) or "forward"
        at = _DROPOUTS.get(node.target)
        drops = at is not None and node.args[at] and (len(node.args) < 3 or node.args[2])
        attention = node.target is _aten.scaled_dot_product_attention.default
        if drops or (attention and len(node.args) > 4 and node.args[4]):
            raise GraphError(f"model {source.name}: dropout in {where!r} is on; its random numbers cannot be the same under "
                             "every plan; set its probability to 0")
        norm_at = _NORMS_OVER_BATCH.get(node.target)
        if norm_at is not None and node.args[norm_at]:
            raise GraphError(f"model {source.name}: {where!r} normalises over the batch and keeps running statistics; its "
                             "result would depend on the microbatch size; use GroupNorm or LayerNorm, or put it into eval()")
        if at is None and torch.Tag.nondeterministic_seeded in node.target.tags and not attention:
            raise GraphError(f"model {source.name}: {where!r} draws random numbers ({node.target}); losses must not depend on "
                             "the plan; take them as an input instead")
    changed = exported.graph_signature.buffers_to_mutate or getattr(exported.graph_signature, "user_inputs_to_mutate", None)
    if changed:
        raise GraphError(f"model {source.name}: it changes {', '.join(sorted(changed.values()))} while it runs; stages must "
                         "not keep state between microbatches; compute it without writing to a buffer")
    outputs = [spec.arg for spec in exported.graph_signature.output_specs]
    if len(outputs) != 1 or not hasattr(outputs[0], "name"):
        raise GraphError(f"model {source.name}: it returns {len(outputs)} values, expected one scalar loss summed over samples")


def _clean(source: ModelSource, graph: fx.Graph, output: fx.Node) -> fx.Node:
    """Take out assertions, dropouts that are off and conversions to what a tensor already is; return the loss."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if "assert" in str(node.target) or "sym_constrain" in str(node.target):
            graph.erase_node(node)
            continue
        same = _unchanged(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif node.target is _aten.view.default:
            node.target = _aten.reshape.default  # a tensor that came over a link is contiguous, its original may not be
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    (loss,) = output.args[0]  # type: ignore[misc]
    value = loss.meta["val"] if isinstance(loss, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 0 or not value.is_floating_point():
        raise GraphError(f"model {source.name}: it returns {_described(value)}, expected a scalar loss summed over the samples")
    return loss  # type: ignore[return-value]


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor of shape {[at_samples(size, 1) for size in value.shape]}"


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The argument that ``node`` returns as it is, if so."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    before, after = first.meta.get("val"), node.meta.get("val")
    if node.target in _DROPOUTS and node.target is not _aten.native_dropout.default:
        return first
    if node.target in _CONVERSIONS and not node.kwargs.get("copy"):
        return first if before.dtype == after.dtype and _strides(before) == _strides(after) else None
    if node.target is _aten.slice.Tensor:
        return first if before.shape == after.shape and (len(node.args) < 5 or node.args[4] == 1) else None
    if node.target in (_aten.contiguous.default, _aten.alias.default, _aten.reshape.default, _aten.view.default,
                       _aten.expand.default, _aten.flatten.using_ints):
        same = tuple(before.shape) == tuple(after.shape) and _strides(before) == _strides(after)
        return first if same else None
    return None


def _strides(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.stride())


def module_path(node: fx.Node) -> str:
    """The path of the deepest module that ran ``node``, "" for the outermost; visits are not told apart."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    path = stack[-1] if stack else ""
    return ".".join(part.partition("@")[0] for part in path.split(".")) if path[:1] != "_" else ""


def is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def at_samples(value: Any, samples: int) -> Any:
    """A size that may depend on the batch, for a batch of ``samples``."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        expression = value.node.expr
        number = expression.subs(dict.fromkeys(expression.free_symbols, samples))
        return int(number) if isinstance(value, torch.SymInt) else number
    return value


def copy_nodes(nodes: Iterable[fx.Node], into: fx.Graph, known: dict[fx.Node, fx.Node], samples: int, device: torch.device,
               rewrite: Callable[[fx.Graph, fx.Node, tuple[Any, ...], dict[str, Any]], fx.Node | None] | None = None) -> None:
    """Append copies of ``nodes`` to ``into``, for exactly ``samples`` samples on ``device``; extends ``known``.

    ``rewrite(graph, node, args, kwargs)`` may return another node to stand for ``node``.
    """
    def value_of(node: fx.Node) -> Any:
        return at_samples(node.meta["val"], samples) if is_number(node) else known[node]

    for node in nodes:
        args = fx.map_arg(node.args, value_of)
        kwargs = dict(fx.map_arg(node.kwargs, value_of))
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = device
        args = tuple(device if isinstance(argument, torch.device) else argument for argument in args)
        kwargs.pop("pin_memory", None)
        copy = rewrite(into, node, args, kwargs) if rewrite is not None else None
        if copy is None:
            copy = into.create_node("call_function", node.target, args, kwargs, name=node.name)
        known[node] = copy


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem
