"""Tiers: files that need no PyTorch make up the tier ``null``, which runs in seconds anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# torch.set_num_threads(1) holds for MKL only on the thread that calls it, and tests run workers on threads of their own: there
# a product would be split or not as MKL sees fit at the moment, with other last bits. Set before anything imports torch.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

NULL = {"test_bad_input", "test_cluster", "test_collectives", "test_graph", "test_plan_rules", "test_planner", "test_program",
        "test_schedules", "test_simulator", "test_simulator_costs", "test_trace", "test_units"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(str(item.fspath)).stem in NULL:
            item.add_marker(pytest.mark.null)
