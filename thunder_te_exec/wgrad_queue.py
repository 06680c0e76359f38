"""Weight gradients that wait: what backward put there, and the programs that compute them later."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from thunder_te_exec import compat

__all__ = ["Waiting", "WgradProgram", "WgradQueue", "WgradSlot"]


class WgradSlot(NamedTuple):
    """A parameter that a program computes the gradient of.

    Attributes:
        name: fully qualified.
        main_grad: whether the gradient is added to the parameter's ``main_grad``; None where that is not looked at.
        fresh: whether the gradient is a tensor of its own, that may become ``.grad``.
    """

    name: str
    main_grad: bool | None
    fresh: bool


class WgradProgram(NamedTuple):
    """Computes gradients together: ``run(*main_grads, *operands)`` gives a dict of them, in the order of ``slots``.

    ``main_grads`` are those of the slots that have one; None stands for what was added to one.
    """

    run: Callable[..., dict[str, torch.Tensor | None]]
    slots: tuple[WgradSlot, ...]
    trace: Any

    @property
    def adds_several_times(self) -> bool:
        """Whether more than one GEMM adds to a ``main_grad``."""
        return sum(bsym.kwargs.get("main_grad") is not None for bsym in self.trace.bound_symbols) > 1


class Waiting:
    """A program with its operands, and the parameters as backward found them.

    Args:
        program: what computes the gradients.
        names: of the parameters, in the model.
        parameters: what gives each; None for one that is gone.
        operands: what the program reads.
    """

    def __init__(
        self,
        program: WgradProgram,
        names: Sequence[str],
        parameters: Sequence[Callable[[], torch.Tensor | None]],
        operands: Sequence[Any],
    ) -> None:
        self.program, self.names, self.operands = program, names, operands
        self._parameters = parameters
        read = [t for t in tree_leaves(operands) if isinstance(t, torch.Tensor) and not t.is_inference()]
        self._versions = [(t, t._version) for t in read]
        # What has been computed, and how many gradients of it are where they belong: an exception may come between.
        self._grads: list[torch.Tensor | None] | None = None
        self._done = 0

    def wanted(self) -> list[torch.Tensor | None]:
        """The parameters; None for one that is gone, or frozen, since."""
        found = (parameter() for parameter in self._parameters)
        return [p if p is not None and p.requires_grad else None for p in found]

    def sets(self) -> list[torch.Tensor]:
        """The parameters whose ``.grad`` is going to be set."""
        slots = list(zip(self.wanted(), self.program.slots))[self._done :]
        return [p for p, slot in slots if p is not None and not slot.main_grad]

    def work_off(self) -> None:
        """Compute the gradients, and add them to ``.grad`` or ``main_grad``; inside ``compat.as_traced``.

        Raises:
            RuntimeError: what a gradient is computed from was written to in place since, or a ``main_grad`` does not
                fit; the message names the parameters.
        """
        wanted, slots = self.wanted(), self.program.slots
        if not any(p is not None for p in wanted):
            return
        main_grads = [
            None if p is None else _main_grad(p, name, slot.main_grad)
            for p, name, slot in zip(wanted, self.names, slots)
        ]
        if self._grads is None:
            self._check_operands()
            used = [m for m, slot in zip(main_grads, slots) if slot.main_grad]
            with _kept_on_error(used if self.program.adds_several_times else []):
                self._grads = list(self.program.run(*used, *self.operands).values())
        for i in range(self._done, len(slots)):
            p, grad = wanted[i], self._grads[i]
            if p is not None and grad is not None:
                _add(grad, p, main_grads[i], fresh=slots[i].fresh)
            self._done = i + 1

    def _check_operands(self) -> None:
        if any(t._version != version for t, version in self._versions):
            raise RuntimeError(
                f"delayed gradients of {', '.join(self.names)}: an input, a buffer or a parameter that they are "
                f"computed from was written to in place since backward; call backward_dw() before"
            )


@contextmanager
def _kept_on_error(tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
    # A graph that is captured would copy them in each replay.
    kept = [(t, t.clone()) for t in tensors if t is not None and not compat.is_captured(t)]
    try:
        yield
    except BaseException:
        for t, before in kept:
            t.copy_(before)
        raise


def _add(grad: torch.Tensor, p: torch.Tensor, main_grad: torch.Tensor | None, *, fresh: bool) -> None:
    """Add ``grad`` of ``p`` as autograd would: a first one becomes ``.grad``, with the strides of ``p``."""
    if main_grad is not None:
        main_grad.add_(grad)
    elif p.grad is not None:
        p.grad.add_(grad)
    elif fresh and grad.stride() == p.stride():
        p.grad = grad
    else:
        p.grad = torch.empty_like(p).copy_(grad)


def _main_grad(parameter: torch.Tensor, name: str, expected: bool | None) -> torch.Tensor | None:
    if expected is None:
        return None
    found = getattr(parameter, "main_grad", None)
    if (found is not None) is not expected:
        raise RuntimeError(
            f"{name}.main_grad: the function was compiled for a parameter that has "
            f"{'one' if expected else 'none'}, and it has {'none' if expected else 'one'} now: set main_grad before "
            f"the first call and keep it, or jit the model again"
        )
    if found is None:
        return None
    fits = found.dtype in (torch.float32, torch.bfloat16) and found.is_contiguous() and found.shape == parameter.shape
    if not fits or found.device != parameter.device:
        raise RuntimeError(
            f"{name}.main_grad: expected a contiguous float32 or bfloat16 tensor of shape {tuple(parameter.shape)} on "
            f"{parameter.device}, got {found.dtype} of shape {tuple(found.shape)} and strides {found.stride()} on "
            f"{found.device}"
        )
    return found


class _Backward:
    """What one backward put into the queue, by a number."""

    def __init__(self, number: int | None, waiting: Sequence[Waiting]) -> None:
        self.number = number
        self.waiting = dict(enumerate(waiting))

    def add(self, waiting: Sequence[Waiting]) -> None:
        start = max(self.waiting, default=-1) + 1
        self.waiting.update(enumerate(waiting, start))


class WgradQueue:
    """What waits, by backward, the oldest first."""

    def __init__(self) -> None:
        self._backwards: list[_Backward] = []
        self._lock, self._works = threading.Lock(), threading.RLock()

    def put(self, waiting: Sequence[Waiting]) -> None:
        """Let ``waiting`` wait from the end of the backward under way; of one that raises nothing is left."""
        compat.after_backward(functools.partial(self._add, waiting))

    def _add(self, waiting: Sequence[Waiting], number: int | None) -> None:
        with self._lock:
            for backward in reversed(self._backwards):
                if number is not None and backward.number == number:
                    backward.add(waiting)
                    return
            self._backwards.append(_Backward(number, waiting))

    def oldest(self, prefix: str) -> list[Waiting]:
        """Of the oldest backward that left something for parameters with ``prefix`` alone, that."""
        return [backward.waiting[number] for backward, number in self._oldest(prefix)]

    def work_off(self, prefix: str) -> bool:
        """Work off :meth:`oldest`; whether there was any. What an exception interrupts stays, with what follows.

        One thread at a time.
        """
        with self._works, compat.as_traced():
            oldest = self._oldest(prefix)
            for backward, number in oldest:
                backward.waiting[number].work_off()
                with self._lock:
                    del backward.waiting[number]  # and the tensors with it
                    if not backward.waiting:
                        self._backwards.remove(backward)
        return bool(oldest)

    def _oldest(self, prefix: str) -> list[tuple[_Backward, int]]:
        with self._lock:
            for backward in self._backwards:
                found = [
                    (backward, number)
                    for number, waiting in backward.waiting.items()
                    if all(name.startswith(prefix) for name in waiting.names)
                ]
                if found:
                    return found
        return []

    def of(
        self, module: torch.nn.Module | None, programs: Sequence[WgradProgram], full_name: Callable[[str], str]
    ) -> Callable[..., None]:
        """The implementation of ``te_delay_wgrad``: lets ``programs`` wait with the operands that it is called with."""
        names = [tuple(full_name(slot.name) for slot in program.slots) for program in programs]
        of_module = None if module is None else weakref.ref(module)  # which has the function that calls this

        def delay(*operands: tuple[Any, ...]) -> None:
            now = of_module()
            if now is not None:
                parameters = (tuple(_references(now, program.slots)) for program in programs)
                self.put([Waiting(*each) for each in zip(programs, names, parameters, operands, strict=True)])

        return delay


def _references(module: torch.nn.Module, slots: Sequence[WgradSlot]) -> Iterator[Callable[[], torch.Tensor | None]]:
    for slot in slots:
        try:
            yield weakref.ref(module.get_parameter(slot.name))
        except (AttributeError, KeyError):  # it was taken out of the module since forward
            yield _gone


def _gone() -> None:
    return None
