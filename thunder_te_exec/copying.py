"""Deep copies of jitted modules, which lightning-thunder 0.2.6 alone fails to make (an AssertionError in a symbol).

``copy.deepcopy(jitted)`` gives a module of its own: parameters, recipe, hooks and FP8 state are copied, and it is
compiled anew in its first call.
"""

from __future__ import annotations

import copy
from typing import Any

from thunder_te_exec import compat

import thunder
from thunder.core.module import ThunderModule
from thunder.extend import TemporaryExecutor

from thunder_te_exec.checkpoint import copy_state
from thunder_te_exec.recipe import Recipe

__all__ = ["deepcopy_jitted"]

#: How ``nn.Module`` names what it keeps of hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def deepcopy_jitted(jitted: ThunderModule, memo: dict[int, Any]) -> ThunderModule:
    """``ThunderModule.__deepcopy__``: jit a deep copy of the original module with the same options.

    Raises:
        NotImplementedError: ``jitted`` has transforms, such as those of ddp and fsdp, which hold state of their own.
    """
    compile_data = compat.jitted_compile_data(jitted)
    if compile_data.transforms:
        names = ", ".join(type(transform).__name__ for transform in compile_data.transforms)
        raise NotImplementedError(
            f"deep copy of a jitted module with transforms ({names}): copy the original module, and jit the copy"
        )
    new = thunder.jit(
        copy.deepcopy(jitted._model, memo),
        langctx=compile_data.langctx,
        executors=[ex for ex in compile_data.executors_list if not isinstance(ex, TemporaryExecutor)],
        sharp_edges=compile_data.sharp_edges,
        cache=compile_data.cache_option,
        disable_torch_autograd=compile_data.disable_torch_autograd_support,
        debug_options=compile_data.debug_options,
        **{k: copy.copy(v) if isinstance(v, Recipe) else v for k, v in compile_data.compile_options.items()},
    )
    memo[id(jitted)] = new
    own = {k: v for k, v in vars(jitted).items() if k not in vars(new) or (k.endswith(_HOOKS) and v)}
    vars(new).update(copy.deepcopy(own, memo))
    new._overrides_parameters = copy.deepcopy(jitted._overrides_parameters, memo)
    new._overrides_buffers = copy.deepcopy(jitted._overrides_buffers, memo)
    copy_state(compile_data, compat.jitted_compile_data(new))
    return new


compat.copy_jitted_modules_by(deepcopy_jitted)
