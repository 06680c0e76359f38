"""What a user can ask a jitted function about."""

from __future__ import annotations

from typing import Any

from thunder_te_exec import compat
from thunder_te_exec.claim import Claim
from thunder_te_exec.state import Fp8State

__all__ = ["claims"]


def claims(jitted: Any) -> tuple[Claim, ...]:
    """The linears that ``jitted`` has been compiled with so far, which run in FP8, and why the others do not.

    One entry for each linear and signature, in the order in which they were first met; empty before the first call.

    Raises:
        TypeError: ``jitted`` did not come from ``thunder.jit``.
    """
    return tuple(Fp8State.of(compat.jitted_compile_data(jitted)).claims.values())
