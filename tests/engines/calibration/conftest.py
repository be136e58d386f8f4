"""Calibrations of tiny models compute with one thread, beside which other tests run."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
