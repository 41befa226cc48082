import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Small tensors only: threads cost more than they give, and much more where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
