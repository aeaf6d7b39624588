"""The split backward: products with a weight hand back the input's gradient at once and put the weight's off.

Every function here computes exactly what autograd computes for the unsplit product, in two calls instead of one.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import fx, nn

__all__ = ["Ledger", "deferring"]

_aten = torch.ops.aten
Rewrite = Callable[[fx.Graph, fx.Node, tuple[Any, ...], dict[str, Any]], fx.Node | None]
_CONVOLUTIONS = {_aten.conv1d.default: 1, _aten.conv2d.default: 2, _aten.conv3d.default: 3}


class Ledger:
    """Where the products of one stage put their work off to; ``open`` is None while nothing is put off."""

    def __init__(self) -> None:
        self.open: list[object] | None = None

    def put_off(self, parameter: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Note ``compute`` for later and return None, or return the gradient now when nothing is put off."""
        if self.open is None:
            return compute()
        self.open.append((parameter, compute))
        return None

    def rows(self, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None) -> torch.Tensor:
        return _Product.apply(x, weight, bias, True, self)  # type: ignore[no-any-return]

    def columns(self, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None) -> torch.Tensor:
        return _Product.apply(x, weight, bias, False, self)  # type: ignore[no-any-return]

    def convolve(self, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, dims: int,
                 *options: Any) -> torch.Tensor:
        return _Convolution.apply(x, weight, bias, dims, options, self)  # type: ignore[no-any-return]

    @staticmethod
    def settle(deferred: list[object]) -> None:
        """Do all of ``deferred`` in order, adding to ``.grad``; the list is emptied so that activations are freed."""
        with torch.no_grad():
            for index, item in enumerate(deferred):
                parameter, compute = item  # type: ignore[misc]
                gradient = compute()
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                deferred[index] = None
        deferred.clear()


class _Product(torch.autograd.Function):
    """x (..., K) times weight: ``rows``: weight (N, K) as in linear; else (K, N) as in addmm."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: bool,
                ledger: Ledger) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.ledger, ctx.parameter = rows, ledger, weight
        if rows:
            return torch.nn.functional.linear(x, weight, bias)
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        rows = ctx.rows
        to_x = gradient @ (weight if rows else weight.t()) if ctx.needs_input_grad[0] else None
        to_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None

        def compute() -> torch.Tensor:
            left, right = gradient.flatten(0, -2), x.flatten(0, -2)
            return left.t() @ right if rows else right.t() @ left

        return to_x, ctx.ledger.put_off(ctx.parameter, compute), to_bias, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dims: int,
                options: tuple[Any, ...], ledger: Ledger) -> torch.Tensor:
        stride, padding, dilation, groups = options
        ctx.save_for_backward(x, weight)
        ctx.dims, ctx.options, ctx.ledger, ctx.parameter = dims, options, ledger, weight
        return _aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * dims, groups)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options

        def part(mask: list[bool]) -> Any:
            return _aten.convolution_backward(gradient, x, weight, [weight.shape[0]], stride, padding, dilation, False,
                                              [0] * ctx.dims, groups, mask)

        to_x, _, to_bias = part([ctx.needs_input_grad[0], False, ctx.needs_input_grad[2]])
        return to_x, ctx.ledger.put_off(ctx.parameter, lambda: part([False, True, False])[1]), to_bias, None, None, None


def deferring(parameters: Container[fx.Node], ledger: Ledger) -> Rewrite:
    """Return the rewrite (see ``export.copy_nodes``) that puts off the weight gradient of every product with a parameter.

    Products with something computed from a parameter stay as they are: their gradient is whole right away.
    """
    def rewrite(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
        choice = None if kwargs else _replacement(node, args, parameters, ledger)
        return None if choice is None else graph.create_node("call_function", *choice, name=node.name)

    return rewrite


def _replacement(node: fx.Node, args: tuple[Any, ...], parameters: Container[fx.Node], ledger: Ledger,
                 ) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]] | None:
    given: Any = node.args
    if node.target is _aten.linear.default and given[1] in parameters and _rank(given[0]) >= 2:
        return ledger.rows, (args[0], args[1], args[2] if len(args) > 2 else None)
    if node.target is _aten.addmm.default and given[2] in parameters and _rank(given[0]) == 1:
        return ledger.columns, (args[1], args[2], args[0])
    if node.target in (_aten.mm.default, _aten.matmul.default) and given[1] in parameters:
        return (ledger.columns, (args[0], args[1], None)) if _rank(given[0]) >= 2 == _rank(given[1]) else None
    dims = _CONVOLUTIONS.get(node.target, 0)
    if not dims or given[1] not in parameters or _rank(given[0]) != dims + 2:
        return None
    stride, padding, dilation = (_full(args[at] if len(args) > at else [default], dims)
                                 for at, default in ((3, 1), (4, 0), (5, 1)))
    return ledger.convolve, (args[0], args[1], args[2] if len(args) > 2 else None, dims, stride, padding, dilation,
                             args[6] if len(args) > 6 else 1)


def _rank(argument: Any) -> int:
    return int(argument.meta["val"].dim()) if isinstance(argument, fx.Node) else 0


def _full(value: Any, dims: int) -> list[int]:
    return list(value) * dims if len(value) == 1 else list(value)
