"""The large rows of the published exact figures, through the simulator: the rest of ``test_simulator.test_exact_schedules``."""

from __future__ import annotations

import pytest

from tests.test_simulator import check_exact, exact_rows, rows

NAMES = sorted({row["schedule"] for row in rows("schedule_exact.csv")})


@pytest.mark.parametrize("name", NAMES)
def test_large_exact_schedules(name: str) -> None:
    check_exact(name, exact_rows(name, large=True))


def test_no_row_is_left_out() -> None:
    both = [len(exact_rows(name, large=large)) for name in NAMES for large in (False, True)]
    assert sum(both) == len(rows("schedule_exact.csv")) == 342
