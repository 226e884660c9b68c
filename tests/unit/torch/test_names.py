"""`ringreduce.torch` has the names and positional arguments of `horovod.torch` 0.28.1, and says what it needs."""

import inspect
import subprocess
import sys

import ringreduce.torch as hvd
from tests.support import names
from tests.support.loops import in_a_loop
from tests.support.patience import patient

# all that horovod.torch exports but elastic, with the names of its arguments
SCALES = "prescale_factor postscale_factor process_set"
IN_PLACE = f"average name op {SCALES}"
ARGUMENTS = {
    "allreduce": f"tensor average name compression op {SCALES}",
    "allreduce_ allreduce_async allreduce_async_": f"tensor {IN_PLACE}",
    "grouped_allreduce": f"tensors average name compression op {SCALES}",
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_": f"tensors {IN_PLACE}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather allgather_async": "tensor name process_set",
    "grouped_allgather grouped_allgather_async": "tensors name process_set",
    "broadcast broadcast_ broadcast_async broadcast_async_": "tensor root_rank name process_set",
    "alltoall alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "join": "device",
    "barrier add_process_set remove_process_set": "process_set",
    "poll synchronize": "handle",
    "init": "comm process_sets",
    "start_timeline": "file_path mark_cycles",
    "ProcessSet": "ranks_or_comm",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "shutdown is_initialized stop_timeline size local_size cross_size rank local_rank cross_rank is_homogeneous": "",
    "mpi_threads_supported mpi_enabled gloo_enabled": "",
    "mpi_built gloo_built nccl_built ddl_built ccl_built": "verbose",  # in horovod.common.util
    "cuda_built rocm_built": "",
}
FUNCTIONS = {name: arguments for names, arguments in ARGUMENTS.items() for name in names.split()}
OTHERS = "Average Sum Adasum Min Max Product HorovodInternalError Compression global_process_set"


@in_a_loop(("name", "arguments"), FUNCTIONS.items())
def test_the_arguments_are_horovods(name, arguments):
    parameters = inspect.signature(getattr(hvd, name)).parameters.values()
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    expected = arguments.split()
    assert positional[: len(expected)] == expected
    required = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    assert set(required) <= set(expected), "what is ours besides must be optional"


def test_the_list_of_the_api_is_complete():
    names.assert_has_them(hvd)
    assert {*FUNCTIONS, *OTHERS.split()} <= set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert len(set(hvd.__all__)) == len(hvd.__all__)


def test_horovods_error_is_a_runtime_error_of_ours():
    import ringreduce

    assert issubclass(ringreduce.MismatchError, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


def test_without_torch_the_message_names_the_cure():
    program = "import sys; sys.modules['torch'] = None; import ringreduce; import ringreduce.torch"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(50))
    assert ended.returncode == 1
    assert "MissingExtraError: ringreduce.torch needs PyTorch; install it with: pip install torch" in (ended.stderr)
