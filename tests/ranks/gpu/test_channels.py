"""GPU arrays in program order, on ranks that are threads over the fake CUDA: `ordered`, and what torch's groups run."""

import numpy as np
import pytest

import ringreduce as rr
from tests.ranks.execution.test_into_outputs import SUM, begin, open_channel
from tests.ranks.gpu.test_gpu import ranks, values

hosts = pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2], [0, 0, 1]], ids=["one host", "hosts", "uneven hosts"])


def mine(rank, count=700, salt=0):
    return values(count, "float32", rank, salt)


@hosts
def test_a_channel_of_all_ranks(gpu, hosts):
    size = len(hosts)

    def program():
        channel, rank = rr.ordered(), rr.rank()
        sent = channel.send_async(gpu.array(mine(rank)), (rank + 1) % size)
        received = gpu.array(np.zeros(700, np.float32))
        channel.recv(received, (rank - 1) % size)
        summed = channel.allreduce(gpu.array(mine(rank, 3000)), op=rr.Sum)
        copied = channel.broadcast(gpu.array(mine(rank)), 1)
        gathered = channel.allgather(gpu.array(mine(rank).reshape(-1, 2)))
        sent.wait()
        return [each.get() for each in (received, summed, copied, gathered)]

    everyones = [mine(each) for each in range(size)]
    for rank, (received, summed, copied, gathered) in enumerate(ranks(hosts, program)):
        np.testing.assert_array_equal(received, everyones[rank - 1])
        np.testing.assert_array_equal(summed, sum(mine(each, 3000) for each in range(size)))
        np.testing.assert_array_equal(copied, everyones[1])
        np.testing.assert_array_equal(gathered, np.concatenate(everyones).reshape(-1, 2))


@hosts
def test_results_in_the_callers_memory(gpu, hosts):
    size = len(hosts)

    def zeros(count=700):
        return gpu.array(np.zeros(count, np.float32))

    def program():
        channel, rank = open_channel(), rr.rank()
        reduced = gpu.array(mine(rank, 3000))
        begin(channel, "allreduce", [reduced], [reduced], SUM).wait()
        gathered, scattered, exchanged = [zeros() for _ in range(size)], zeros(), [zeros() for _ in range(size)]
        begin(channel, "all_gather", [gpu.array(mine(rank))], gathered).wait()
        begin(channel, "reduce_scatter", [gpu.array(mine(rank, salt=r)) for r in range(size)], [scattered], SUM).wait()
        begin(channel, "all_to_all", [gpu.array(mine(rank, salt=r)) for r in range(size)], exchanged).wait()
        target = zeros()
        if rank == 0:  # a message that comes before its receive
            begin(channel, "recv", outputs=[target], signed=[target], payload=(1, 5)).wait()
            begin(channel, "recv", outputs=[zeros()], signed=[target], payload=(1, 4)).wait()
        elif rank == 1:
            for tag in (4, 5):
                begin(channel, "send", [gpu.array(mine(tag))], signed=[target], payload=(0, tag)).wait()
        return [each.get() for each in (reduced, scattered, *gathered, *exchanged, target)]

    for rank, (reduced, scattered, *rest, target) in enumerate(ranks(hosts, program)):
        np.testing.assert_array_equal(reduced, sum(mine(each, 3000) for each in range(size)))
        np.testing.assert_array_equal(scattered, sum(mine(each, salt=rank) for each in range(size)))
        np.testing.assert_array_equal(rest[:size], [mine(each) for each in range(size)])
        np.testing.assert_array_equal(rest[size:], [mine(each, salt=rank) for each in range(size)])
        np.testing.assert_array_equal(target, mine(5) if rank == 0 else np.zeros(700))
