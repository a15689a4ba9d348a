"""The planner's predictions against published measurements; nothing is fitted, so the bounds are wide."""

import statistics

from benchmarks import planner

ROWS, REST = planner.compare()


def ratios(*words: str) -> list[float]:
    found = [row.ratio for row in ROWS if all(word in row.group for word in words)]
    assert found
    return found


def test_every_row_that_can_be_expressed():
    assert len(ROWS) == 103
    assert len(REST) == 15  # shares of time, memory, bounds, parameters, and collectives of unknown size


def test_what_links_bound():
    """Many tokens to many experts: within a third of the time on GPUs; on the A3 kernels get less of their links."""
    assert 0.8 < statistics.median(ratios("many tokens", "H800")) < 1.1
    assert 0.8 < statistics.median(ratios("many tokens", "B200")) < 1.1
    assert 0.5 < statistics.median(ratios("many tokens", "A3")) < 1.1


def test_what_latency_bounds():
    """The time that a kernel needs to start, quantize and synchronize is not in the model."""
    assert all(0.7 < ratio < 1.1 for ratio in ratios("remote access"))
    assert all(0.25 < ratio < 1.0 for ratio in ratios("low latency"))
    assert 0.6 < statistics.median(ratios("combine", "low latency")) < 1.0


def test_no_prediction_is_slower_than_a_measurement_by_much():
    """The model has no overheads, so it errs on one side."""
    assert max(row.ratio for row in ROWS) < 1.05
