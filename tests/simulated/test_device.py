"""The simulation itself: what CUDA refuses is refused, and what it does is done.

It shows that devices do not mix, that nothing reads a GPU's memory as if it were the host's, and that no result rests
on the order of threads, on which of equal values comes first, or on memory that nobody wrote. It cannot show how
CUDA's kernels round and in which order they add up, errors that come later than the call that made them, how much
memory there is, and how long anything takes: for these there are the tests on a GPU.
"""

import numpy as np
import pytest
import torch
from simulated.device import WAITS, SimulatedTensor, simulated_device
from simulated.refusals import RefusedError

from rolloutdoctor.engine.devices import find_device
from rolloutdoctor.ops import segments as seg

TWO_DEVICES = "found at least two devices"
NO_ORDER = "does not have a deterministic implementation"


def there(values, dtype=None):
    return torch.tensor(values, dtype=dtype).to("cuda")


def test_a_tensor_says_where_it_is(device):
    x = there([1.0, 2.0])
    assert isinstance(x, SimulatedTensor)
    assert x.device == torch.device("cuda", 0)
    assert x.is_cuda
    assert not x.is_cpu
    assert find_device("auto").type == find_device("cuda").type == device
    assert torch.cuda.device_count() == 1


def test_it_is_gone_afterwards():
    before = torch.cuda.is_available()
    with simulated_device():
        x = there([1.0])
        assert torch.cuda.is_available()
    assert torch.cuda.is_available() == before
    if not before:
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")
    assert x.on_host.tolist() == [1.0]


@pytest.mark.parametrize("where", ["cuda", "cuda:0", torch.device("cuda")])
def test_what_makes_tensors(device, where):
    made = [
        torch.empty(2, device=where),
        torch.zeros(2, device=where),
        torch.ones(2, device=where),
        torch.full((2,), 3.0, device=where),
        torch.arange(2, device=where),
        torch.tensor([1.0, 2.0], device=where),
        torch.as_tensor(np.zeros(2), device=where),
    ]
    x = made[1]
    made += [torch.zeros_like(x), torch.full_like(x, 2), x.new_zeros(2), x.new_tensor([1, 2]), x.clone(), x.double()]
    assert all(each.device.type == device for each in made)
    assert made[3].tolist() == [3.0, 3.0]
    assert torch.zeros(2).device.type == torch.zeros_like(x, device="cpu").device.type == "cpu"


def test_memory_that_nobody_wrote_is_no_number(device):
    assert torch.empty(2, device="cuda").isnan().all()
    assert torch.empty_like(there([1.0])).isnan().all()
    assert torch.empty(1, dtype=torch.int64, device="cuda").tolist() != [0]


def test_copies(device):
    x = torch.tensor([1.0, 2.0])
    for moved in (x.to("cuda"), x.cuda(), x.to(torch.device("cuda"), copy=True), x.to("cuda", torch.float64)):
        assert moved.device.type == device
        assert moved.cpu().tolist() == moved.to("cpu").tolist() == moved.tolist() == [1.0, 2.0]
    moved = x.to("cuda")
    assert moved.to("cuda") is moved
    assert x.cpu() is x
    moved[:1].copy_(torch.tensor([5.0]).pin_memory(), non_blocking=True)
    x.copy_(moved)
    assert x.tolist() == [5.0, 2.0]
    assert x.to("cuda", copy=True)[1:].add_(1).tolist() == [3.0]
    # Only the copy of a value that the host can wait for may be read.
    with pytest.raises(RefusedError, match="nobody waits"):
        moved.to("cpu", non_blocking=True)
    with pytest.raises(RefusedError, match="nobody waits"):
        x.copy_(moved, non_blocking=True)


def test_pinned_memory_is_the_host_s(device):
    assert torch.ones(2).pin_memory().is_pinned()
    assert not torch.ones(2).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        there([1.0]).pin_memory()


@pytest.mark.parametrize("read", [lambda x: x.numpy(), np.asarray, np.array, np.from_dlpack, lambda x: x.__array__()])
def test_the_host_cannot_read_its_memory(device, read):
    with pytest.raises(TypeError):
        read(there([1.0, 2.0]))
    assert there([1.0]).numpy(force=True).tolist() == [1.0]


def test_single_values_can_be_asked_for_and_are_counted(device):
    x = there([1.0, 2.0])
    WAITS.clear()
    assert (x[0].item(), float(x[1]), int(x[1]), bool(x[0] == 1)) == (1.0, 2.0, 2, True)
    assert sum(WAITS.values()) == 4
    x.nonzero(), x[x > 1], x.tolist(), x.cpu(), torch.equal(x, x), torch.repeat_interleave(x.long())
    assert sum(WAITS.values()) == 10
    x.sum(), x[:1], torch.where(x > 1, x, 0.0), torch.repeat_interleave(x.long(), output_size=3)
    assert sum(WAITS.values()) == 10


def test_views_share_memory_and_shapes_follow(device):
    x = torch.zeros(4, device="cuda")
    x[1:3] = 2.0
    x.view(2, 2)[0].add_(1)
    assert x.tolist() == [1.0, 3.0, 2.0, 0.0]
    assert x.unsqueeze_(0).shape == (1, 4)
    out = torch.zeros(3, dtype=torch.int64, device="cuda")
    assert torch.cumsum(there([1, 2]), 0, out=out[1:]).tolist() == [1, 3]
    assert out.tolist() == [0, 1, 3]


MIXED = {
    "sum": lambda x, y: x + y,
    "sum in place": lambda x, y: x.add_(y),
    "sum into the host": lambda x, y: y.add_(x),
    "number into the host": lambda x, y: y[0].add_(x[0]),
    "two numbers": lambda x, y: torch.addcmul(x, y[0], y[1]),
    "number of the device": lambda x, y: x[0] + y,
    "comparison": lambda x, y: x < y,
    "where": lambda x, y: torch.where(y > 1, x, 0.0),
    "where with values": lambda x, y: torch.where(x > 1, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x[0], y[0]]),
    "searchsorted": lambda x, y: torch.searchsorted(x, y),
    "segment_reduce": lambda x, y: torch.segment_reduce(x, "sum", offsets=torch.tensor([0, 2]), unsafe=True),
    "repeat_interleave": lambda x, y: torch.repeat_interleave(x, torch.tensor([1, 2])),
    "index_select": lambda x, y: x.index_select(0, torch.tensor([0])),
    "gather": lambda x, y: x.gather(0, torch.tensor([0])),
    "index_add": lambda x, y: x.index_add_(0, torch.tensor([0]), x[:1].clone()),
    "values put": lambda x, y: x.__setitem__(there([0, 1]), y),
    "mask of the device": lambda x, y: y[x > 1],
    "index of the device": lambda x, y: y[there([0])],
    "put by an index of the device": lambda x, y: y.__setitem__(there([0]), 1.0),
    "masked_fill": lambda x, y: x.masked_fill(y > 1, 0.0),
    "equal": torch.equal,
    "result on the host": lambda x, y: torch.add(x, x, out=y),
}


@pytest.mark.parametrize("name", MIXED)
def test_devices_do_not_mix(device, name):
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        MIXED[name](there([1.0, 2.0]), torch.tensor([1.0, 2.0]))


def test_numbers_and_indices_of_the_host_are_taken(device):
    x, number = there([1.0, 2.0]), torch.tensor(3.0)
    assert (x + number).tolist() == (number + x).tolist() == [4.0, 5.0]
    assert torch.where(x > 1, x, number).tolist() == [3.0, 2.0]
    assert x.masked_fill(x > 1, number).tolist() == [1.0, 3.0]
    assert x[torch.tensor([1, 0])].tolist() == [2.0, 1.0]
    assert x[torch.tensor([False, True])].tolist() == [2.0]
    x[torch.tensor([0])] = 7.0
    x[there([1])] = number
    assert x.tolist() == [7.0, 3.0]


UNORDERED = {
    "weighted bincount": lambda x, at: torch.bincount(at, weights=x),
    "index_add": lambda x, at: x.index_add_(0, at, x.clone()),
    "scatter_add": lambda x, at: x.scatter_add_(0, at, x.clone()),
    "scatter_reduce": lambda x, at: x.scatter_reduce(0, at, x.clone(), "sum"),
    "scatter": lambda x, at: x.scatter_(0, at, x.clone()),
    "index_copy": lambda x, at: x.index_copy_(0, at, x.clone()),
    "put and add": lambda x, at: x.index_put_((at,), x.clone(), accumulate=True),
    "put": lambda x, at: x.__setitem__(at, x.clone()),
}


@pytest.mark.parametrize("name", UNORDERED)
def test_what_depends_on_the_order_of_threads(device, name):
    with pytest.raises(RuntimeError, match=NO_ORDER):
        UNORDERED[name](there([1.0, 2.0, 3.0]), there([0, 1, 0]))
    if name != "weighted bincount":
        # Values that meet nobody have no order.
        UNORDERED[name](there([1.0, 2.0, 3.0]), there([2, 1, 0]))


@pytest.mark.parametrize("run", [lambda x: x.cumsum(0), lambda x: x.median(0), lambda x: x.histc(2)])
def test_what_has_no_kernel_with_an_order(device, run):
    with pytest.raises(RuntimeError, match=NO_ORDER):
        run(there([1.0, 2.0]))


def test_integers_and_extremes_have_no_order(device):
    at, ones = there([0, 1, 0]), there([1, 1, 1])
    assert ones.cumsum(0).tolist() == [1, 2, 3]
    assert torch.bincount(at).tolist() == [2, 1]
    assert torch.zeros_like(ones).index_add_(0, at, ones).tolist() == [2, 1, 0]
    assert there([0.0, 0.0]).scatter_reduce(0, at, there([1.0, 2.0, 3.0]), "amax").tolist() == [3.0, 2.0]
    x = there([0.0, 0.0])
    x[at] = 5.0
    assert x.tolist() == [5.0, 5.0]


def test_which_of_equal_values_comes_first_is_open(device):
    x = there([2.0, 1.0, 1.0])
    assert torch.argsort(x).tolist() == [2, 1, 0]
    assert torch.argsort(x, stable=True).tolist() == [1, 2, 0]
    assert torch.sort(x, stable=True, descending=True)[1].tolist() == [0, 1, 2]
    assert torch.topk(x, 2, largest=False).indices.tolist() == [2, 1]
    assert torch.sort(x).values.tolist() == [1.0, 1.0, 2.0]


def test_histograms_have_no_kernel(device):
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.histogram(there([1.0]), 2)


@pytest.mark.parametrize("place", ["numpy", "weights", "constant"])
def test_code_for_the_cpu_is_noticed(device, place):
    """Operations of the package take their way for a GPU; the way for the CPU, or half of it, fails."""
    x, offsets, index = there([1.0, 2.0, 4.0]), there([0, 2, 2, 3]), there([1, 0, 1])
    assert seg.total(x, offsets).tolist() == [3.0, 0.0, 4.0]
    assert seg.total_by(index, x).tolist() == [2.0, 5.0]
    wrong = {
        "numpy": lambda: torch.from_numpy(x.numpy()),
        "weights": lambda: torch.bincount(index, weights=x.double()),
        "constant": lambda: x * torch.ones(3),
    }
    with pytest.raises((TypeError, RuntimeError)):
        wrong[place]()
