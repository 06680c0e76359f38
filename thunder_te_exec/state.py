"""FP8 state: amax histories and scales of delayed scaling, and who owns them.

All state belongs to one jitted function: :meth:`Fp8State.of` keeps it on the function's CompileData, so that it lives
and dies with it and two jitted functions never share any.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from thunder_te_exec.calls import CheckpointedCalls
from thunder_te_exec.names import WeightNames
from thunder_te_exec.recipe import TensorRole, same_recipe
from thunder_te_exec.wgrad_queue import WgradQueue

__all__ = ["AmaxGroup", "AmaxSlot", "Fp8State", "GroupKind", "LinearKey", "Loaded", "SlotKey"]


class LinearKey(NamedTuple):
    """A linear, independent of the trace it stands in: its weight, and which use of that weight it is."""

    weight: str
    use: int


class AmaxSlot(NamedTuple):
    """Delayed-scaling state of one tensor: views, of shape (1,) and float32, into its group.

    ``amax`` collects the current step's maximum; ``scale`` is what the tensor is multiplied with when it is quantized.
    """

    scale: torch.Tensor
    amax: torch.Tensor
    group: AmaxGroup
    index: int

    @property
    def history(self) -> torch.Tensor:
        """The tensor's amax history, float32 (amax_history_len,), a view."""
        return self.group.history[:, self.index]

    @property
    def scale_inv(self) -> torch.Tensor:
        """What quantized numbers are multiplied with to get the tensor's back, float32 (1,), a view."""
        return self.group.scale_inv[self.index, :1]

    def note(self, row_amaxes: torch.Tensor) -> None:
        """Take ``row_amaxes``, float32 of any shape, into ``amax`` when the group takes all that was noted."""
        self.group.note(self.index, row_amaxes)

    @property
    def replay(self) -> AmaxSlot:
        """The slot of the same tensor in the group's replay."""
        return self.group.replay.slot(self.index)


class AmaxGroup:
    """Delayed-scaling state of all tensors of one direction that were first compiled together.

    Contiguous, so that one reduction and one update serve all of them.

    Attributes:
        history: float32 (amax_history_len, tensors); row 0 collects the current step.
        scale: float32 (tensors,).
        dtype: FP8 type that the tensors are quantized to.
        keys: whose tensors they are, in order.
        updates: how often ``scale`` was computed anew.
    """

    def __init__(
        self, tensors: int, length: int, dtype: torch.dtype, device: torch.device, keys: Sequence[SlotKey] = ()
    ) -> None:
        with torch.inference_mode(False):  # what is made inside inference mode can't be updated outside of it
            self.history = torch.zeros(length, tensors, dtype=torch.float32, device=device)
            self.scale = torch.ones(tensors, dtype=torch.float32, device=device)
        self.dtype = dtype
        self.keys = tuple(keys)
        self.updates = 0
        self._scale_inv: torch.Tensor | None = None
        self._noted: dict[int, torch.Tensor] = {}
        self._replay: AmaxGroup | None = None
        self._replayed: torch.Tensor | None = None

    def slot(self, i: int) -> AmaxSlot:
        return AmaxSlot(self.scale[i : i + 1], self.history[0, i : i + 1], self, i)

    @property
    def scale_inv(self) -> torch.Tensor:
        """``1 / scale``, right after each :meth:`scale_changed`: column 0 of a float32 (tensors, 4), one for good.

        cuBLAS reads a scale from an address that is a multiple of 16.
        """
        if self._scale_inv is None:
            with torch.inference_mode(False):
                self._scale_inv = self.scale.reciprocal()[:, None].repeat(1, 4)
        return self._scale_inv

    def scale_changed(self) -> None:
        """To be called when ``scale`` has been written to."""
        if self._scale_inv is not None:
            torch.reciprocal(self.scale, out=self._scale_inv[:, 0])

    def note(self, i: int, row_amaxes: torch.Tensor) -> None:
        """Keep ``row_amaxes`` of tensor ``i`` for :meth:`take_noted`; until then ``history`` does not have them."""
        if i in self._noted:
            self.take_noted()
        self._noted[i] = row_amaxes

    def take_noted(self) -> None:
        """Raise amaxes to what was noted: few kernels for all, where each tensor's own would take two."""
        if self._noted:
            noted, self._noted = self._noted, {}
            amaxes = [self.history[0, i] for i in noted]
            torch._foreach_maximum_(amaxes, torch._foreach_max(list(noted.values())))

    def drop_noted(self) -> None:
        """Forget what was noted, by a call that an exception cut short."""
        self._noted = {}

    @property
    def replay(self) -> AmaxGroup:
        """A group of the same tensors to quantize with earlier scales in; nobody reads the amaxes that it collects."""
        if self._replay is None:
            self._replay = AmaxGroup(self.scale.numel(), 1, self.dtype, self.scale.device)
        return self._replay

    def load_replay(self, scale: torch.Tensor) -> None:
        """Put ``scale``, float32 (tensors,), a copy of this group's scale at an earlier time, into the replay."""
        if self._replayed is not scale:
            self.replay.scale.copy_(scale)
            self.replay.scale_changed()
            self._replayed = scale


class GroupKind(NamedTuple):
    """What tensors have in common that are updated together."""

    forward: bool
    length: int
    dtype: torch.dtype
    device: torch.device


class SlotKey(NamedTuple):
    """A tensor that is quantized with delayed scaling: which one of which linear, and how."""

    linear: LinearKey
    role: TensorRole
    length: int
    dtype: torch.dtype
    device: torch.device

    @property
    def kind(self) -> GroupKind:
        return GroupKind(self.role.forward, self.length, self.dtype, self.device)


class Loaded(NamedTuple):
    """A checkpoint that waits for the slots that its entries belong to.

    ``entries`` are those not taken yet, ``strict`` says whether every slot of the next compilation must find its own,
    ``recipes`` is the checkpoint's entry of its recipes.
    """

    entries: dict[str, torch.Tensor]
    strict: bool
    recipes: torch.Tensor


@dataclass
class Fp8State:
    """What one jitted function keeps between calls and between compilations.

    Attributes:
        names: maps a trace's weights to the parameters they come from.
        claims: decision for each linear that was looked at, with its reason (``thunder_te_exec.claim``).
        warned: warnings already given, each at most once a jitted function.
        slots: delayed-scaling state of every tensor that has been compiled.
        groups: where these lie, by kind; a list grows when a compilation meets new linears.
        recipes: those that the function has been compiled for, each once.
        weights: quantized weights that are kept between calls, by linear and recipe.
        optimizer_steps: counts optimizers' steps where weights are kept; None elsewhere.
        loaded: a checkpoint that was loaded before the first compilation.
        checkpointed: the calls under ``torch.utils.checkpoint``.
        full_name: the name of a weight outside of this function, where it is part of a model.
        is_used_elsewhere: whether a parameter of this function is one outside of it too, where it is part of a model.
        wgrads: the weight gradients that wait.
        wgrad_traces: what the latest compilation delays, a trace for each program.
    """

    names: WeightNames = field(default_factory=WeightNames)
    claims: dict[Any, Any] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    slots: dict[SlotKey, AmaxSlot] = field(default_factory=dict)
    groups: dict[GroupKind, list[AmaxGroup]] = field(default_factory=dict)
    recipes: list[Any] = field(default_factory=list)
    weights: dict[Any, Any] = field(default_factory=dict)
    optimizer_steps: Any = None
    loaded: Loaded | None = None
    checkpointed: CheckpointedCalls = field(default_factory=CheckpointedCalls)
    full_name: Callable[[str], str] = str
    is_used_elsewhere: Callable[[torch.Tensor], bool] = lambda _: False
    wgrads: WgradQueue = field(default_factory=WgradQueue)
    wgrad_traces: tuple[Any, ...] = ()

    @classmethod
    def of(cls, compile_data: Any) -> Fp8State:
        """The FP8 state of the jitted function that ``compile_data`` belongs to."""
        if "thunder_te_exec" not in vars(compile_data):
            compile_data.thunder_te_exec = cls()
        return compile_data.thunder_te_exec

    def index_of_recipe(self, recipe: Any) -> int:
        """Which of ``recipes`` it is; the last, added, where the function has not been compiled for it yet."""
        for i, known in enumerate(self.recipes):
            if same_recipe(known, recipe):
                return i
        self.recipes.append(recipe)
        return len(self.recipes) - 1

    def delayed_scaling_slots(
        self, keys: Iterable[SlotKey], shared: Mapping[SlotKey, SlotKey]
    ) -> tuple[list[AmaxSlot], list[SlotKey]]:
        """State of the tensors of ``keys``, made where it does not exist yet.

        New tensors of one kind go into one group together. ``shared`` maps a tensor that is another one too to that
        one, whose slot it gets; it has one of its own for traces in which it is not shared, so that what slots there
        are does not depend on which traces there are.

        Returns:
            A slot for each tensor, in order, and the keys of those that are new.
        """
        keys = list(keys)
        new: dict[GroupKind, list[SlotKey]] = {}
        for key in dict.fromkeys(keys):
            if key not in self.slots:
                new.setdefault(key.kind, []).append(key)
        for kind, members in new.items():
            group = AmaxGroup(len(members), kind.length, kind.dtype, kind.device, members)
            self.groups.setdefault(kind, []).append(group)
            self.slots.update({key: group.slot(i) for i, key in enumerate(members)})
        made = [key for members in new.values() for key in members]
        return [self.slots[shared.get(key, key)] for key in keys], made

    def take_noted(self) -> None:
        """To be called before histories are read or written: what an exception cut short may have left something."""
        for group in self._all_groups():
            group.take_noted()

    def scales_changed(self) -> None:
        """To be called when scales of any group have been written to."""
        for group in self._all_groups():
            group.scale_changed()

    def _all_groups(self) -> Iterator[AmaxGroup]:
        return itertools.chain.from_iterable(self.groups.values())

    def forget(self, keys: Iterable[SlotKey]) -> None:
        """Undo the making of the slots of ``keys``, all of whose groups were made with them."""
        for key in keys:
            group = self.slots.pop(key).group
            groups = self.groups[key.kind]
            groups[:] = [g for g in groups if g is not group]
