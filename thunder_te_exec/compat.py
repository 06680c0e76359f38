"""Everything that depends on a version of torch, thunder or Transformer Engine.

Imported before thunder by every module of the package, so that ``import thunder`` finds a torch it knows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction as _Reentrant

# lightning-thunder 0.2.6 looks these up on torch.Tensor at import; torch >= 2.13 no longer has them.
_NAMED_TENSOR_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _absent_method(name: str) -> Any:
    def absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"torch {torch.__version__} has no Tensor.{name}: it has no named tensors")

    absent.__name__ = name  # thunder registers torch's functions under their __name__
    return absent


for _name in _NAMED_TENSOR_METHODS:
    if not hasattr(torch.Tensor, _name):
        setattr(torch.Tensor, _name, _absent_method(_name))

if not hasattr(torch.autograd.Function.apply, "__func__"):
    # torch 2.14 has it in C; thunder looks for the function of a Python classmethod, to trace calls of it.
    _apply = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return _apply.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)

if torch.__version__ >= (2, 13) and importlib.util.find_spec("torch.fx._lazy_graph_module"):
    # thunderfx traces into a graph module that torch 2.13 recompiles lazily while it is being traced.
    import torch.fx._lazy_graph_module as _lazy

    _lazy._force_skip_lazy_graph_module_flag = True


with warnings.catch_warnings():
    # thunder says so about its own executor, also to those who do not use it.
    warnings.filterwarnings("ignore", message="transformer_engine module not found")
    import thunder  # noqa: F401


@functools.cache
def te_version() -> str | None:
    """Version of the installed Transformer Engine, or None where it is not installed."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def te_recipes() -> ModuleType | None:
    """``transformer_engine.common.recipe``, or None where Transformer Engine cannot be imported."""
    if te_version() is None:
        return None
    try:
        return importlib.import_module("transformer_engine.common.recipe")
    except Exception:  # a TE built for another torch or CUDA raises OSError, ImportError or RuntimeError
        return None


@functools.cache
def te_import_error() -> str | None:
    """Why ``transformer_engine.pytorch`` cannot be used here, or None when it can."""
    if te_version() is None:
        return "transformer-engine is not installed (pip install 'thunder-te-exec[te]')"
    try:
        importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine_torch")
    except Exception as e:
        return f"transformer-engine {te_version()} does not import: {type(e).__name__}: {e}"
    return None


def te_autocast_state() -> tuple[int, bool, Any, Any] | None:
    """(depth, enabled, recipe, amax reduction group) of the active ``te.autocast``; None where TE cannot be used."""
    if te_import_error() is not None:
        return None
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    s = FP8GlobalStateManager.quantization_state
    return s.autocast_depth, s.fp8_enabled, s.fp8_recipe, s.fp8_distributed_group


def te_default_recipe() -> Any:
    """The recipe that TE would use on this device outside any context."""
    from transformer_engine.pytorch.quantization import get_default_recipe

    return get_default_recipe()


def te_dtype(dtype: torch.dtype) -> Any:
    """Transformer Engine's name of ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``."""
    from transformer_engine.pytorch.constants import DType

    return DType.kFloat8E4M3 if dtype is torch.float8_e4m3fn else DType.kFloat8E5M2


def raise_after_backward_with_create_graph(message: str) -> None:
    """Make the backward under way raise ``message`` when it has ended, where it was called with ``create_graph=True``.

    torch runs what thunder differentiated with grad mode off, and its callbacks at the end of a backward in the mode
    that the caller asked for. Outside of a backward this does nothing.
    """
    if torch._C._current_graph_task_id() != -1:
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_raise_if_grad_enabled, message))


def _raise_if_grad_enabled(message: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(message)


def after_backward(callback: Callable[[int | None], None]) -> None:
    """Call ``callback`` with a number that only the backward under way has, when it has ended, unless it raises.

    Outside of a backward, at once, with None.
    """
    task = torch._C._current_graph_task_id()
    if task == -1:
        callback(None)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(callback, task))


@functools.cache
def prepare_autograd_thread(device: torch.device) -> None:
    """Let the thread that runs backwards on ``device``, a CUDA device, have its cuBLAS handle.

    thunder runs backward in the thread of the caller, but while a CUDA graph is captured in that one, where a handle
    cannot be made any more: the steps before do not warm it up.
    """

    def multiply_in_backward() -> None:
        x = torch.ones(16, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)

    # In a thread of its own, where the caller's modes and hooks, such as a checkpoint's, are not in force.
    thread = threading.Thread(target=multiply_in_backward)
    thread.start()
    thread.join()


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether what is done with ``tensor`` now goes into a CUDA graph; torch built for the CPU cannot be asked."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class CheckpointRun(NamedTuple):
    """A run of a ``torch.utils.checkpoint``.

    Attributes:
        checkpoint: an object that the first run and the second ones, which happen in backward, have in common.
        recomputation: None in the first run; with ``use_reentrant=False`` an object of its own in each second one, with
            ``use_reentrant=True`` the checkpoint.
        reentrant: whether it is one of ``use_reentrant=True``, whose first run has gradients switched off.
    """

    checkpoint: Any
    recomputation: Any
    reentrant: bool


def checkpoint_under_way() -> CheckpointRun | None:
    """The innermost ``torch.utils.checkpoint`` that is running; None outside.

    torch has no function that says so. What it has is the hook that such a run puts on tensors that are saved, which
    knows its checkpoint, or the function that is being run.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__:
        pack = inspect.unwrap(hooks[0])
        known = dict(zip(pack.__code__.co_freevars, (cell.cell_contents for cell in pack.__closure__)))
        if "frame" in known:
            return CheckpointRun(known["frame"], None, reentrant=False)
        return CheckpointRun(known["target_frame_ref"](), pack, reentrant=False)
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        return None  # neither the first run of a reentrant one nor in a backward: spares the walk
    forward, backward = (f.__code__ for f in (_Reentrant.forward, _Reentrant.backward))
    frame = sys._getframe()
    while frame is not None and frame.f_code not in (forward, backward):
        frame = frame.f_back
    if frame is None:
        return None
    checkpoint = frame.f_locals["ctx"]
    if frame.f_code is backward:
        return CheckpointRun(checkpoint, checkpoint, reentrant=True)
    # Where nothing wants a gradient there is no second run.
    return CheckpointRun(checkpoint, None, reentrant=True) if any(checkpoint.needs_input_grad) else None


def jitted_compile_data(fn: Any) -> Any:
    """The CompileData of a function or module returned by ``thunder.jit``.

    Raises:
        TypeError: ``fn`` did not come from ``thunder.jit``.
    """
    cd = getattr(fn, "_lc_cd", None)
    if cd is None:
        raise TypeError(f"expected what thunder.jit or jit_blocks returned, got {type(fn).__name__}")
    return cd


def all_compile_data(fn: Any) -> list[Any]:
    """The CompileData of ``fn``, returned by ``thunder.jit``, or of each part of it, returned by ``jit_blocks``.

    Raises:
        TypeError: ``fn`` did not come from either.
    """
    return _compile_data_of_parts(fn) or [jitted_compile_data(fn)]


def number_read_on_host(fn: Any) -> str:
    """What reads a tensor's number in a program that ``fn``, jitted, was compiled to; empty where nothing does."""
    all_stats = [fn._lc_cs] if hasattr(fn, "_lc_cs") else [forward._lc_cs for forward in _jitted_forwards(fn)]
    for entry in (entry for compile_stats in all_stats for entry in list.__iter__(compile_stats.interpreter_cache)):
        for bsym in entry.computation_traces[0].bound_symbols:
            if reads_number_on_host(bsym):
                return bsym.sym.name
    return ""


def reads_number_on_host(bsym: Any) -> bool:
    """Whether ``bsym``, or what it consists of, reads a tensor's number, as ``Tensor.item`` does."""
    from thunder.core.prims import PrimIDs

    return bsym.sym.id is PrimIDs.ITEM or any(map(reads_number_on_host, bsym.subsymbols))


def has_jitted(module: torch.nn.Module) -> bool:
    """Whether ``module`` or one inside came from ``thunder.jit`` or ``jit_blocks``."""
    return any(hasattr(m, "_lc_cd") for m in module.modules()) or bool(_compile_data_of_parts(module))


def _compile_data_of_parts(fn: Any) -> list[Any]:
    if hasattr(fn, "_lc_cd") or not isinstance(fn, torch.nn.Module):
        return []
    return [forward._lc_cd for forward in _jitted_forwards(fn)]


def _jitted_forwards(fn: torch.nn.Module) -> list[Any]:
    forwards = (vars(module).get("forward") for module in fn.modules())
    return [forward for forward in forwards if hasattr(forward, "_lc_cd")]


@contextmanager
def compiling(compile_data: Any, compile_stats: Any) -> Iterator[None]:
    """What happens inside is part of a compilation of the jitted function of ``compile_data``."""
    from thunder.core.compile_data import compile_data_and_stats

    with compile_data_and_stats(compile_data, compile_stats):
        yield


def runs(compile_data: Any, executor: str) -> bool:
    """Whether the jitted function of ``compile_data`` has the registered ``executor``."""
    return thunder.extend.get_executor(executor) in compile_data.executors_list


def jitted_module(compile_data: Any) -> torch.nn.Module | None:
    """What thunder reads the parameters of the function of ``compile_data`` from; None where it is no module."""
    fn = compile_data.fn
    return compile_data._thunder_module_map.get(id(fn), fn) if isinstance(fn, torch.nn.Module) else None


def makes_cuda_graphs(compile_data: Any) -> bool:
    """Whether a ``CUDAGraphTransform`` of thunder's is among the transforms of ``compile_data``."""
    from thunder.transforms.cudagraph import CUDAGraphTransform

    return any(isinstance(transform, CUDAGraphTransform) for transform in compile_data.transforms)


def tensor_places(module: torch.nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Each parameter and buffer of ``module``, jitted: its name, and a mapping and key under which calls find it."""
    own: dict[str, Mapping[str, Any]] = {}
    for overrides in (getattr(module, f"_overrides_{kind}", {}) for kind in ("parameters", "buffers")):
        own.update(dict.fromkeys(overrides, overrides))
    for path, inner in getattr(module, "_model", module).named_modules(remove_duplicate=False):
        for tensors in (inner._parameters, inner._buffers):
            for key in (key for key, t in tensors.items() if t is not None):
                name = f"{path}.{key}" if path else key
                yield (name, own[name], name) if name in own else (name, tensors, key)


def set_signature(trace: Any, name: str, args: Sequence[Any]) -> None:
    """Let ``trace`` be the function ``name`` of the proxies ``args``."""
    from thunder.core.codeutils import SigInfo

    trace.args, trace.kwargs = tuple(args), {}
    trace._siginfo = SigInfo.from_name_and_args(name, args)


def executable(trace: Any, executors: Sequence[Any]) -> Any:
    """``trace`` as one that can be run, what ``executors`` can run being run by them and the rest by torch."""
    from thunder.executors.passes import del_last_used, transform_for_execution

    return del_last_used(transform_for_execution(trace, executors))


@contextmanager
def as_traced() -> Iterator[None]:
    """What a trace's decorators see to, for several functions of traces: no gradients, no torch.autocast.

    Nor inference mode, whose tensors no gradient can be added to outside of it.
    """
    enabled = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    with torch.inference_mode(False), torch.no_grad():
        try:
            for device in enabled:
                torch.set_autocast_enabled(device, False)
            yield
        finally:
            for device, was in enabled.items():
                torch.set_autocast_enabled(device, was)


class Program:
    """The function of a trace, that can be made again with other objects bound."""

    def __init__(self, trace: Any, **options: Any) -> None:
        self._name = trace.siginfo().name
        self._code = compile(trace.python(**options), f"thunder.{self._name}", "exec")
        self._objects = {**trace.python_ctx(), "thunder": thunder}

    def bound_to(self, objects: Mapping[str, Any]) -> Callable[..., Any]:
        """The function, with ``objects`` under the names that the trace has for them."""
        namespace = {**self._objects, **objects}
        exec(self._code, namespace)
        return namespace.pop(self._name)


def _without_reads_of(attributes: Collection[str], prologue: Any) -> Any:
    from thunder.core.prims import PrimIDs
    from thunder.core.trace import from_trace

    unread: set[str] = set()
    new = from_trace(prologue)
    for bsym in prologue.bound_symbols:
        if bsym.sym.id is PrimIDs.UNPACK_ATTR and bsym.args[1] in attributes:
            unread.add(bsym.output.name)
        elif not any(p.name in unread for p in bsym.flat_proxy_args):
            new.bound_symbols.append(bsym)
    return new


class EntryPrograms:
    """The programs of a CacheEntry, from which an entry for another module that is alike can be made.

    Made as lightning-thunder 0.2.6 makes them (``apply_transforms_and_build_cache_entry``).

    Args:
        ignore: attributes of modules that the other's prologue does not check.
    """

    def __init__(self, entry: Any, ignore: Collection[str] = ()) -> None:
        from thunder.common import transform_to_torch_types

        self.entry = entry
        self._prologue = Program(_without_reads_of(ignore, entry.prologue_traces[-1]), include_decorators=False)
        self._forward = Program(transform_to_torch_types(entry.computation_traces[-1]))
        self._backward = Program(entry.backward_traces[-1]) if entry.backward_fn is not None else None

    def prologue_of(self, module: torch.nn.Module) -> Callable[..., Any]:
        """The prologue that reads ``module``."""
        return self._prologue.bound_to({"__function_obj": module})

    def entry_of(self, prologue: Callable[..., Any], objects: Mapping[str, Any]) -> Any:
        """The entry with ``prologue`` and with ``objects`` in its forward and backward."""
        return self.entry._replace(
            prologue_fn=prologue,
            computation_fn=self._forward.bound_to(objects),
            backward_fn=None if self._backward is None else self._backward.bound_to(objects),
        )


def copy_jitted_modules_by(deepcopy: Callable[[Any, dict[int, Any]], Any]) -> None:
    """Let ``copy.deepcopy`` of thunder's modules be ``deepcopy``; lightning-thunder 0.2.6 fails to make any."""
    from thunder.core.module import ThunderModule

    if "__deepcopy__" not in vars(ThunderModule):
        ThunderModule.__deepcopy__ = deepcopy


def warn(message: str) -> None:
    """Warn at the line outside of this package, thunder and torch that the call which is under way came from."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_NOT_THE_USERS = ("thunder_te_exec", "thunder", "torch", "contextlib", "functools")


def current_compilation() -> tuple[Any, Any]:
    """(CompileData, CompileStats) of the jitted function being compiled; (None, None) outside a compilation."""
    from thunder.core.compile_data import _compile_data

    return _compile_data.get()


def is_tracing() -> bool:
    """Whether thunder is recording a program, so that what runs now runs once, at compile time."""
    from thunder.core.trace import get_tracectx

    return get_tracectx() is not None


def compile_option(name: str, description: str) -> Any:
    """The value of ``thunder.jit(..., name=value)`` in the compilation under way, or None."""
    from thunder.core.compile_data import get_compile_option

    return get_compile_option(name, description)
