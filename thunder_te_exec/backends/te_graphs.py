"""Transformer Engine's ``make_graphed_callables``, for what is no Transformer Engine module."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

__all__ = ["ToCapture", "capture"]


class ToCapture(Protocol):
    """What is captured: called for its forward, and for the weight gradients that its backward left to wait."""

    @property
    def module(self) -> torch.nn.Module: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def need_backward_dw(self) -> bool: ...

    def backward_dw(self) -> None: ...


def capture(callables: Sequence[ToCapture], sample_args: Sequence[tuple[Any, ...]], **options: Any) -> tuple[Any, ...]:
    """``transformer_engine.pytorch.make_graphed_callables`` of ``callables``; ``options`` are those of that function.

    Returns:
        What it returns: a graphed callable for each element of ``sample_args``, with ``backward_dw`` and ``reset``.
    """
    from transformer_engine.pytorch import graph as te_graph

    collects = gc.isenabled()
    try:
        # A class of its own: Transformer Engine wraps its __call__, for good where the capture fails.
        modules = tuple(map(_module_class(), callables))
        return te_graph.make_graphed_callables(modules, tuple(sample_args), **options)
    finally:
        te_graph.set_capture_end()
        if collects:
            gc.enable()


def _module_class() -> type[torch.nn.Module]:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    class GraphedModule(TransformerEngineBaseModule):
        """A module of which Transformer Engine captures weight gradients too, as it does of its own alone.

        Its inner modules are not shown, for the hooks that are put on them; it has no FP8 state that Transformer Engine
        could save, restore or update.
        """

        def __init__(self, of: ToCapture) -> None:
            super().__init__()
            self._of = of

        @property
        def training(self) -> bool:
            return self._of.module.training if "_of" in vars(self) else True

        @training.setter
        def training(self, mode: bool) -> None:
            if "_of" in vars(self):
                self._of.module.train(mode)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._of(*args, **kwargs)

        def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
            return self._of.parameters()

        def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
            return self._of.module.buffers()

        def need_backward_dw(self) -> bool:
            return self._of.need_backward_dw()

        def backward_dw(self) -> None:
            self._of.backward_dw()

        def get_fp8_meta_tensors(self) -> None:
            return None

        def reset_fp8_meta_tensors(self, fp8_meta_tensors: Any = None) -> None:
            pass

    return GraphedModule
