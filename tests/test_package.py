"""The package as it is installed."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for d in ("thunder_te_exec", "thunder_te_exec/backends", "passes") for p in (ROOT / d).glob("*.py"))


def test_the_wheel_installs_one_top_level_package_with_everything_in_it(tmp_path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("thunder_te_exec", "passes"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert {n.split("/")[0] for n in names} == {"thunder_te_exec"}
    installed = {n.removeprefix("thunder_te_exec/") for n in names}
    here = {str(p.relative_to(ROOT)).removeprefix("thunder_te_exec/") for p in SOURCES}
    assert installed == here


#: Each layer imports only those before it.
LAYERS = (
    ("compat",),
    ("recipe_classes", "recipe", "layouts", "symbols", "autocast", "schedule"),
    ("passes",),
    ("names", "calls", "wgrad_queue", "state"),
    ("backends",),
    (
        "settings",
        "cache",
        "checkpoint",
        "claim",
        "fp8_weight",
        "frozen",
        "weight_cache",
        "scale_updates",
        "linear",
        "forward_context",
        "binding",
        "copying",
        "delayed_wgrad",
        "pins",
        "graphed_layer",
        "cuda_graph_transform",
        "cuda_graphs",
    ),
    ("alike", "executor"),
    ("jit_blocks",),
    ("__init__",),
)


def layer_of(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if module in names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_no_layer_above_its_own(path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    here = parts[0] if parts[0] == "passes" else parts[1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("thunder_te_exec"):
            continue
        below = node.module.split(".")[1:]
        for module in below[:1] or [a.name for a in node.names]:
            if any(module in names for names in LAYERS):
                assert layer_of(module) <= layer_of(here), f"{path.name} imports {module}"


def test_passes_know_no_backend_and_no_state() -> None:
    for path in (ROOT / "passes").glob("*.py"):
        imported = {n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        ours = {m.removeprefix("thunder_te_exec.") for m in imported if m.startswith("thunder_te_exec")}
        allowed = {"thunder_te_exec", "symbols"}
        assert all(m in allowed or m.startswith("passes") for m in ours), path.name


def test_versions_are_asked_for_in_the_compat_module_alone() -> None:
    for path in SOURCES:
        if path.name != "compat.py":
            assert "__version__" not in path.read_text() and "importlib.metadata" not in path.read_text(), path.name
