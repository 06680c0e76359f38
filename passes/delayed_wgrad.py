"""Split the backward in two: what other gradients need, and the weight gradients of claimed linears, which wait.

Before::

    (g1, gw1, gb1) = te_functional_linear_backward(.., ctx1, (sx1, sw1), g, weight_requires_grad=True, ...)
    (_, gw0, _) = te_functional_linear_backward(.., ctx0, (sx0,), g1, input_requires_grad=False, ...)
    te_sync_fp8_meta_bwd()
    return {'output': (None, gw0, gw1, gb1), ...}

After::

    (g1, qg1, gb1) = te_functional_linear_dgrad(.., ctx1, (sw1,), g, weight_requires_grad=True, ...)
    (_, qg0, _) = te_functional_linear_dgrad(.., ctx0, (), g1, input_requires_grad=False, ...)
    te_sync_fp8_meta_bwd()
    te_delay_wgrad((ctx1, sx1, qg1, gb1), (ctx0, sx0, qg0))
    return {'output': (None, None, None, None), ...}

and, as traces of their own, whose arguments are the tuples that ``te_delay_wgrad`` gets ::

    def wgrad(ctx1, sx1, qg1, gb1):
        gw1 = te_functional_linear_wgrad(ctx1, (sx1,), qg1)
        return {'w1': gw1, 'b1': gb1}

    def wgrad(ctx0, sx0, qg0): ...

Gradients are quantized in the first part, in both directions at once, so that the scales move there, and the bias's is
summed there, where the gradient is at hand and need not be kept. What depends on a gradient that waits, and what a
tied weight gets elsewhere, waits with it, in the trace of all that is computed together. In such a trace, ::

        te_functional_linear_wgrad(ctx1, (sx1,), qg1, main_grad=w1_main_grad)
        return {'w1': None, ...}

adds to the tensor ``main_grad`` of a parameter that has one, where its gradient is a sum of linears' gradients.

A linear stays whole where its weight's or bias's gradient ends elsewhere than in gradients of parameters, or where a
gradient is quantized, or a tensor written to in place, on the way there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thunder_te_exec import compat
from thunder_te_exec.passes.patterns import computes, is_add, recorded, writes_in_place
from thunder_te_exec.passes.rewrite import insert_before_return, joint_return, return_of, with_bound_symbols
from thunder_te_exec.symbols import (
    Wanted,
    is_te_backward,
    is_te_linear,
    is_te_recompute,
    te_delay_wgrad,
    te_functional_linear_wgrad,
)

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import AnyProxy, Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol, has_tags
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["DelayedPart", "delayed_wgrad"]


class DelayedPart(NamedTuple):
    """Weight and bias gradients that are computed together, later.

    Attributes:
        trace: takes the ``main_grad`` of each parameter of ``of_weights`` that has one, in the order of ``parameters``,
            and what ``te_delay_wgrad`` got; returns a dict, with None for what it added to a ``main_grad``.
        parameters: whose gradients they are, in the order of the dict.
        of_weights: those of which a linear's weight gradient is part.
        fresh: those whose gradient is a tensor of its own.
    """

    trace: TraceCtx
    parameters: tuple[str, ...]
    of_weights: frozenset[str]
    fresh: frozenset[str]


def delayed_wgrad(
    trace: TraceCtx, parameters: Mapping[str, str], with_main_grad: Container[str], dgrad: Symbol, wgrad: Symbol
) -> tuple[TraceCtx, tuple[DelayedPart, ...]]:
    """Take out of a joint trace the weight and bias gradients of claimed linears, and what only these need.

    Args:
        trace: the joint trace; a trace without gradients is given back.
        parameters: the arguments that are parameters, whose gradients may wait, with a name for each; of one name are
            arguments that are one parameter.
        with_main_grad: those whose weight gradient is added to their ``main_grad``.
        dgrad, wgrad: ``te_functional_linear_dgrad`` and ``te_functional_linear_wgrad``.
    """
    returned = joint_return(trace)
    if returned is None:
        return trace, ()
    must_not_wait = _what_must_not_wait(trace, returned, parameters)
    new = with_bound_symbols(trace, (), "Delayed weight gradients")
    groups = _Groups()
    with tracectx(new):
        for bsym in trace.bound_symbols:
            grads = [g for g in bsym.output[1:] if g is not None] if is_te_backward(bsym) else []
            if grads and not any(g.name in must_not_wait for g in grads):
                first, later = _split(bsym, dgrad, wgrad) if Wanted.of(bsym).weight else (bsym, ())
                new.bound_symbols.append(first)
                groups.add(later, grads)
            elif bsym.sym.id is not prims.PrimIDs.RETURN and groups.wait_for(bsym.flat_proxy_args):
                groups.add((bsym,), bsym.flat_proxy_outs)
            else:
                new.bound_symbols.append(bsym)
    waiting = groups.with_gradients(returned, parameters)
    if not waiting:
        return trace, ()
    operands, parts = zip(*(_part(new, bsyms, grads, with_main_grad) for bsyms, grads in waiting))
    names = {parameters[arg] for _, grads in waiting for arg in grads}
    return _returning_the_rest(
        new, returned, operands, {arg for arg, name in parameters.items() if name in names}
    ), parts


def _what_must_not_wait(trace: TraceCtx, returned: dict[str, Any], parameters: Container[str]) -> set[str]:
    """The names of what something that must be there at the end of backward, or must happen in it, depends on."""
    slots = zip(returned["output"], returned["flat_args"])
    names = {g.name for g, arg in slots if isinstance(g, Proxy) and arg.name not in parameters}
    names.update(p.name for p in tree_flatten(returned["fw_flat_out"])[0] if isinstance(p, Proxy))
    for bsym in reversed(trace.bound_symbols):
        if bsym.sym.id is prims.PrimIDs.RETURN:
            continue
        if _happens_in_backward(bsym) or any(out.name in names for out in bsym.flat_proxy_outs):
            names.update(p.name for p in bsym.flat_proxy_args)
    return names


def _happens_in_backward(bsym: BoundSymbol) -> bool:
    claimed = is_te_backward(bsym) or is_te_linear(bsym) or is_te_recompute(bsym)
    return claimed or writes_in_place(bsym) or has_tags(bsym, {prims.OpTags.DONT_DCE})


class _Groups:
    """What waits, in groups that share nothing: a union-find over proxies."""

    def __init__(self) -> None:
        self._waiting: list[tuple[BoundSymbol, int]] = []
        self._joined: list[int] = []
        self._of: dict[str, int] = {}

    def wait_for(self, proxies: Iterable[Proxy]) -> bool:
        """Whether one of ``proxies`` is there only later."""
        return any(p.name in self._of for p in proxies)

    def add(self, bsyms: Sequence[BoundSymbol], outputs: Iterable[Proxy]) -> None:
        """Let ``bsyms`` and ``outputs`` wait, as one group with the groups that they read something of."""
        group = self._join({self._of[p.name] for b in bsyms for p in b.flat_proxy_args if p.name in self._of})
        self._waiting += [(bsym, group) for bsym in bsyms]
        self._of.update((p.name, group) for p in outputs)

    def _join(self, groups: set[int]) -> int:
        """``groups`` made one; a new one where there are none."""
        roots = {self._root(group) for group in groups}
        group = min(roots, default=len(self._joined))
        if not roots:
            self._joined.append(group)
        for other in roots:
            self._joined[other] = group
        return group

    def _root(self, group: int) -> int:
        while self._joined[group] != group:
            self._joined[group] = group = self._joined[self._joined[group]]
        return group

    def with_gradients(
        self, returned: dict[str, Any], parameters: Mapping[str, str]
    ) -> list[tuple[list[BoundSymbol], dict[str, list[Proxy]]]]:
        """Of each group its symbols, in order, and by parameter the gradients of which ``returned`` has one of it.

        autograd adds up what one parameter gets in one backward before it adds that to ``.grad``: where it gets
        several gradients, all wait for the last.
        """
        slots: dict[str, list[tuple[str, Proxy]]] = {}
        for grad, arg in zip(returned["output"], returned["flat_args"]):
            if isinstance(grad, Proxy) and arg.name in parameters:
                slots.setdefault(parameters[arg.name], []).append((arg.name, grad))
        waiting = [grads for grads in slots.values() if self.wait_for(grad for _, grad in grads)]
        groups = [self._join({self._of[g.name] for _, g in grads if g.name in self._of}) for grads in waiting]
        found: dict[int, tuple[list[BoundSymbol], dict[str, list[Proxy]]]] = {}
        for group, grads in sorted(zip(map(self._root, groups), waiting), key=lambda each: each[0]):
            found.setdefault(group, ([], {}))[1][grads[0][0]] = [grad for _, grad in grads]
        for bsym, group in self._waiting:
            if self._root(group) in found:
                found[self._root(group)][0].append(bsym)
        return list(found.values())


def _split(bsym: BoundSymbol, dgrad: Symbol, wgrad: Symbol) -> tuple[BoundSymbol, tuple[BoundSymbol]]:
    *shapes, ctx, saved, grad_output = bsym.args
    grad_input, grad_weight, grad_bias = bsym.output
    half = len(saved) // 2 if Wanted.of(bsym).input else len(saved)
    quantized = AnyProxy(object(), prefix="qg")
    args = (*shapes, ctx, saved[half:], grad_output)
    first = bsym.from_bsym(sym=dgrad, args=args, output=(grad_input, quantized, grad_bias))
    later = wgrad.bind(ctx, saved[:half], quantized, output=grad_weight)
    later.tags |= bsym.tags
    return first, (later,)


def _returning_the_rest(
    trace: TraceCtx, returned: dict[str, Any], operands: Sequence[tuple[Proxy, ...]], waiting: Container[str]
) -> TraceCtx:
    slots = zip(returned["output"], returned["flat_args"])
    grads = tuple(None if isinstance(g, Proxy) and arg.name in waiting else g for g, arg in slots)
    delay = te_delay_wgrad.bind(*operands, output=None)
    delay.tags.add(BoundSymbolTag.BACKWARD)
    end = return_of(trace)
    rewritten = end.from_bsym(args=({**returned, "output": grads}, *end.args[1:]))
    bsyms = [rewritten if b is end else b for b in insert_before_return(trace, delay)]
    return with_bound_symbols(trace, bsyms, "Delayed weight gradients")


def _part(
    trace: TraceCtx, bsyms: list[BoundSymbol], terms: dict[str, list[Proxy]], with_main_grad: Container[str]
) -> tuple[tuple[Proxy, ...], DelayedPart]:
    """The part that computes the sums of ``terms`` by ``bsyms``, and what these read of ``trace``."""
    new = with_bound_symbols(trace, (), "Delayed weight gradients")
    bsyms, grads = _summed(new, bsyms, terms)
    of_weights = _of_weights(bsyms, grads)
    fresh = _fresh(bsyms, grads)
    with tracectx(new):
        main_grads = {
            name: AnyProxy(object(), name=f"{name}_main_grad")
            for name in grads
            if name in of_weights and name in with_main_grad
        }
    made = {out.name for b in bsyms for out in b.flat_proxy_outs}
    read = (p for proxies in (*(b.flat_proxy_args for b in bsyms), grads.values()) for p in proxies)
    operands = {p.name: p for p in read if p.name not in made}
    bsyms, grads = _accumulated(bsyms, grads, main_grads)
    args = (*main_grads.values(), *operands.values())
    compat.set_signature(new, "wgrad", args)
    with tracectx(new):
        for arg in args:
            prims.unpack_trivial(arg, name=arg.name)
        new.bound_symbols += bsyms
        prims.python_return(grads)
    return tuple(operands.values()), DelayedPart(new, tuple(grads), of_weights, fresh)


def _summed(
    trace: TraceCtx, bsyms: list[BoundSymbol], terms: dict[str, list[Proxy]]
) -> tuple[list[BoundSymbol], dict[str, Proxy]]:
    bsyms, grads = list(bsyms), {}
    for name, (total, *others) in terms.items():
        for other in others:
            bsyms += recorded(trace, bsyms[0], ltorch.add, total, other)
            total = bsyms[-1].output
        grads[name] = total
    return bsyms, grads


def _of_weights(bsyms: list[BoundSymbol], grads: dict[str, Proxy]) -> frozenset[str]:
    of_weights: set[str] = set()
    for bsym in bsyms:
        if bsym.sym == te_functional_linear_wgrad or any(p.name in of_weights for p in bsym.flat_proxy_args):
            of_weights.update(out.name for out in bsym.flat_proxy_outs)
    return frozenset(name for name, grad in grads.items() if grad.name in of_weights)


def _readers(bsyms: list[BoundSymbol], grads: dict[str, Proxy]) -> Counter[str]:
    """By proxy, how often it is read or returned."""
    read = (p for proxies in (*(b.flat_proxy_args for b in bsyms), grads.values()) for p in proxies)
    return Counter(p.name for p in read)


def _fresh(bsyms: list[BoundSymbol], grads: dict[str, Proxy]) -> frozenset[str]:
    readers = _readers(bsyms, grads)
    views = {
        out.name
        for bsym in bsyms
        if not (bsym.sym == te_functional_linear_wgrad or computes(bsym))
        for out in bsym.flat_proxy_outs
    }
    return frozenset(name for name, grad in grads.items() if readers[grad.name] == 1 and grad.name not in views)


def _accumulated(
    bsyms: list[BoundSymbol], grads: dict[str, Proxy], main_grads: dict[str, AnyProxy]
) -> tuple[list[BoundSymbol], dict[str, Proxy | None]]:
    """``bsyms`` and ``grads`` with the GEMMs of each sum of weight gradients adding to its ``main_grad``."""
    producer = {out.name: bsym for bsym in bsyms for out in bsym.flat_proxy_outs}
    readers = _readers(bsyms, grads)
    rewritten: dict[int, tuple[BoundSymbol, ...]] = {}
    for name, main_grad in main_grads.items():
        products, sums = _sum_of_products(grads[name], producer, readers)
        if products:
            rewritten.update({id(product): (_adding_to(main_grad, product),) for product in products})
            rewritten.update({id(bsym): () for bsym in sums})
            grads = {**grads, name: None}
    return [b for bsym in bsyms for b in rewritten.get(id(bsym), (bsym,))], grads


def _sum_of_products(
    grad: Proxy, producer: dict[str, BoundSymbol], readers: Counter[str]
) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """The wgrads that ``grad`` is the sum of, and the additions; none where it is something else."""
    products, sums, terms = [], [], [grad]
    while terms:
        term = terms.pop()
        bsym = producer.get(term.name)
        if bsym is None or readers[term.name] > 1:
            return [], []
        if bsym.sym == te_functional_linear_wgrad:
            products.append(bsym)
        elif is_add(bsym):
            sums.append(bsym)
            terms += bsym.args[:2]
        else:
            return [], []
    return products, sums


def _adding_to(main_grad: AnyProxy, product: BoundSymbol) -> BoundSymbol:
    adding = product.from_bsym(kwargs={**product.kwargs, "main_grad": main_grad}, output=None)
    adding.tags.add(prims.OpTags.DONT_DCE)
    return adding
