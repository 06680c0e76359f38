"""Delayed weight gradients as a user works them off: the interface of Transformer Engine's modules, for a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_te_exec import compat
from thunder_te_exec.state import Fp8State

__all__ = ["DelayedWgrad"]


class DelayedWgrad:
    """The weight and bias gradients that backward left to wait, for ``te_delay_wgrad=True``.

    What a backward left is worked off by one :meth:`backward_dw`, that of the oldest backward first. Gradients add to
    ``.grad`` as autograd's would, to the last bit where one backward gives a parameter one gradient. autograd's own
    hooks of these parameters know nothing of them. A backward that raises leaves nothing; what it leaves waits when it
    has ended.

    Args:
        jitted: what ``thunder.jit`` or ``jit_blocks`` returned.
        submodule: a submodule's name: of each backward, the gradients of its parameters alone. What is computed
            together with a parameter outside of it, such as a tied weight's gradient, is left to the whole.

    Raises:
        TypeError: ``jitted`` did not come from ``thunder.jit`` or ``jit_blocks``, or it is no module; ``submodule`` is
            no string.
        ValueError: it was not given ``te_delay_wgrad=True``, or not ``te_ex``.
        AttributeError: it has no such submodule.
    """

    def __init__(self, jitted: Any, submodule: str = "") -> None:
        of_parts = compat.all_compile_data(jitted)
        if not isinstance(jitted, torch.nn.Module):
            raise TypeError(f"DelayedWgrad: expected a jitted module, got {type(jitted).__name__}: jit the module")
        if of_parts[0].compile_options.get("te_delay_wgrad") is not True:
            raise ValueError("DelayedWgrad: no gradient waits without thunder.jit(..., te_delay_wgrad=True)")
        if not compat.runs(of_parts[0], "thunder_te"):
            raise ValueError("DelayedWgrad: no gradient waits without thunder.jit(..., executors=[te_ex, ...])")
        if not isinstance(submodule, str):
            raise TypeError(f"DelayedWgrad: expected the name of a submodule, got {type(submodule).__name__}")
        jitted.get_submodule(submodule)
        self._prefix = f"{submodule}." if submodule else ""
        self._states = [Fp8State.of(compile_data) for compile_data in of_parts]
        self._queue = self._states[0].wgrads
        self._hooks: list[Callable[[], None]] = []

    def need_backward_dw(self) -> bool:
        """Whether something waits. Transformer Engine's method of this name says whether delaying is switched on."""
        return bool(self._queue.oldest(self._prefix))

    def backward_dw(self) -> None:
        """Compute what the oldest backward left, then call the hooks. Where nothing waits, nothing happens.

        After an exception the gradients that were not set yet still wait, and the next call sets them.
        """
        if self._queue.work_off(self._prefix):
            for hook in self._hooks:
                hook()

    def get_backward_dw_params(self) -> list[torch.nn.Parameter]:
        """The parameters whose ``.grad`` the next :meth:`backward_dw` sets, each once; none where nothing waits.

        Not among them: what is frozen, and a weight whose gradient is accumulated into its ``main_grad``.
        """
        found = (p for waiting in self._queue.oldest(self._prefix) for p in waiting.sets())
        return list({id(p): p for p in found}.values())

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call ``hook()`` after each :meth:`backward_dw` of this object that worked something off, in order.

        One that raises ends the call: gradients are set by then, and later hooks do not run.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"register_wgrad_accumulation_and_reduce_hooks: expected a function, got {hook!r}")
        self._hooks.append(hook)

    def traces(self) -> list[Any]:
        """What the latest compilation lets wait, a trace for each set of gradients that are computed together."""
        return [trace for state in self._states for trace in state.wgrad_traces]
