"""An executor for lightning-thunder that runs linears in FP8 and computes nothing that frozen parameters don't need."""

from thunder_te_exec import compat  # noqa: F401  (first: prepares torch for `import thunder`)
from thunder_te_exec import copying, recipe  # noqa: F401  (copying: copy.deepcopy of jitted modules)
from thunder_te_exec.autocast import autocast
from thunder_te_exec.checkpoint import fp8_state_dict, load_fp8_state_dict
from thunder_te_exec.claim import Claim, claims, is_thin
from thunder_te_exec.cuda_graph_transform import CUDAGraphTransform
from thunder_te_exec.cuda_graphs import GraphedCallable, make_graphed_callables
from thunder_te_exec.delayed_wgrad import DelayedWgrad
from thunder_te_exec.executor import te_ex
from thunder_te_exec.frozen import FrozenWeight, dequantize_, quantize_frozen_
from thunder_te_exec.jit_blocks import jit_blocks

__all__ = [
    "CUDAGraphTransform",
    "Claim",
    "DelayedWgrad",
    "FrozenWeight",
    "GraphedCallable",
    "autocast",
    "claims",
    "dequantize_",
    "fp8_state_dict",
    "is_thin",
    "jit_blocks",
    "load_fp8_state_dict",
    "make_graphed_callables",
    "quantize_frozen_",
    "recipe",
    "te_ex",
]
