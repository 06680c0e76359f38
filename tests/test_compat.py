"""What depends on versions and on what is installed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from thunder_te_exec import compat
from thunder_te_exec.backends import default_backend
from thunder_te_exec.backends.reference import ReferenceBackend
from thunder_te_exec.recipe import DelayedScaling


def test_importing_the_package_first_makes_thunder_import_on_every_torch_that_is_supported() -> None:
    script = """
        import torch
        for name in ("align_as", "align_to", "has_names", "refine_names", "rename"):
            if hasattr(torch.Tensor, name):
                delattr(torch.Tensor, name)
        import thunder_te_exec
        import thunder
        try:
            torch.ones(1).rename("a")
        except NotImplementedError as e:
            assert "rename" in str(e), e
        print("imported")
    """
    if not hasattr(torch.Tensor, "rename"):
        pytest.fail("the package is imported here: the methods must be there")
    if torch.__version__ < (2, 13):
        pytest.skip("this torch has named tensors of its own")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0 and "imported" in done.stdout, done.stderr


def test_a_function_apply_that_is_written_in_c_gets_a_python_one_that_differentiates() -> None:
    script = """
        import torch
        plain = vars(torch._C._FunctionBase)["apply"]
        torch.autograd.Function.apply = plain  # as in torch 2.14
        assert not hasattr(torch.autograd.Function.apply, "__func__")
        import thunder_te_exec
        import thunder

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, g):
                return g * 3

        x = torch.ones(2, requires_grad=True)
        Double.apply(x).sum().backward()
        assert x.grad.tolist() == [3.0, 3.0]
        print("differentiated")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0 and "differentiated" in done.stdout, done.stderr


def test_each_device_has_its_default_backend_or_a_reason() -> None:
    assert isinstance(default_backend(torch.device("cpu"), DelayedScaling())[0], ReferenceBackend)
    assert default_backend(torch.device("meta"), DelayedScaling()) == (None, "no backend for device type 'meta'")


@pytest.mark.skipif(compat.te_version() is not None, reason="Transformer Engine is installed")
def test_cuda_without_transformer_engine_gets_no_backend_and_says_what_to_install() -> None:
    backend, why = default_backend(torch.device("cuda"), DelayedScaling())
    assert backend is None and "pip install 'thunder-te-exec[te]'" in why


def test_outside_a_compilation_there_is_no_compile_data() -> None:
    assert compat.current_compilation() == (None, None)
