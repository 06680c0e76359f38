"""GPU tests are skipped without a GPU; golden traces are text files in traces_golden/."""

from __future__ import annotations

from pathlib import Path

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import torch
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

GOLDEN = Path(__file__).parent.parent / "traces_golden"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


class GoldenTrace(SingleFileSnapshotExtension):
    """One text file a snapshot, named by the snapshot alone."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    @classmethod
    def dirname(cls, *, test_location) -> str:
        return str(GOLDEN)

    @classmethod
    def get_snapshot_name(cls, *, test_location, index=0) -> str:
        return str(index)


@pytest.fixture
def golden(snapshot):
    """``assert text == golden(name="seeds")`` compares with traces_golden/seeds.txt."""
    return snapshot.use_extension(GoldenTrace)
