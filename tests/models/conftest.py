"""Small tensors are fastest on one thread; more only wait for each other."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
