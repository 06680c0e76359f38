"""CUDA without Transformer Engine: nothing is claimed, one warning says what to install, numbers are torch's."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_nothing_is_claimed_and_one_warning_says_what_to_install() -> None:
    script = """
        import sys, warnings
        sys.modules["transformer_engine"] = None  # as if it could not be imported
        from thunder_te_exec import claims, te_ex
        import thunder, torch
        module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).cuda()
        x = torch.randn(16, 32, device="cuda")
        compiled = thunder.jit(module, executors=[te_ex])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(compiled(x), module(x))
        ours = [str(w.message) for w in caught if "thunder_te_exec claims no linear" in str(w.message)]
        assert len(ours) == 1, ours
        assert "does not import" in ours[0] or "pip install" in ours[0], ours
        assert not any(c.claimed for c in claims(compiled)) and all(c.reason for c in claims(compiled))
        reference = thunder.jit(module, executors=[te_ex], te_backend="reference")
        reference(x)
        assert all(c.claimed for c in claims(reference))
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
