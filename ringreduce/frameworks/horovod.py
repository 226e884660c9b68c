"""All public names of Horovod 0.28.1: which module of ringreduce has each, or what to use in its place.

No other list of them is made by hand. From this one come the attribute errors of frameworks' modules, what
`import horovod` gives in jobs of `ringrun --horovod` (stand_in.py), and tables in docs/horovod.md; a test walks it.
The flags of horovodrun are in the launcher's config/horovod.py.
"""

from __future__ import annotations

import functools
import opcode
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

VERSION = "0.28.1"


class Module(NamedTuple):
    """A module of Horovod's."""

    here: str  # the modules of ringreduce in which its names are looked for, with blanks between them
    names: str  # all its public names, with blanks between them


MODULES = {
    "horovod": Module(
        "ringreduce",
        "__version__ run",
    ),
    "horovod.common": Module("ringreduce", ""),
    "horovod.common.basics": Module(
        "ringreduce",
        "HorovodBasics ProcessSet global_process_set",
    ),
    "horovod.common.elastic": Module(
        "ringreduce.elastic",
        "HorovodInternalError HostUpdateResult HostsUpdatedInterrupt ObjectState State WorkerNotificationManager "
        "notification_manager run_fn",
    ),
    "horovod.common.exceptions": Module(
        "ringreduce",
        "HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt",
    ),
    "horovod.common.process_sets": Module(
        "ringreduce",
        "HorovodBasics ProcessSet add_process_set global_process_set is_iterable remove_process_set",
    ),
    "horovod.common.util": Module(
        "ringreduce",
        "HorovodVersionMismatchError ccl_built check_extension ddl_built extension_available "
        "get_average_backwards_compatibility_fun gloo_built gpu_available is_iterable "
        "is_version_greater_equal_than mpi_built nccl_built num_rank_is_power_2 split_list",
    ),
    "horovod.data": Module(
        "ringreduce",
        "AsyncDataLoaderMixin BaseDataLoader",
    ),
    "horovod.data.data_loader_base": Module(
        "ringreduce",
        "AsyncDataLoaderMixin BaseDataLoader",
    ),
    "horovod.keras": Module(
        "ringreduce.keras",
        "Adasum Average Compression DistributedOptimizer PartialDistributedOptimizer Sum allgather allreduce "
        "broadcast broadcast_global_variables callbacks ccl_built cross_rank cross_size cuda_built ddl_built "
        "elastic global_process_set gloo_built gloo_enabled init is_initialized load_model local_rank local_size "
        "mpi_built mpi_enabled mpi_threads_supported nccl_built rank reducescatter rocm_built shutdown size "
        "start_timeline stop_timeline",
    ),
    "horovod.keras.callbacks": Module(
        "ringreduce.keras.callbacks",
        "BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback "
        "LearningRateWarmupCallback MetricAverageCallback",
    ),
    "horovod.keras.elastic": Module(
        "ringreduce.keras.elastic",
        "CommitStateCallback KerasState UpdateBatchStateCallback UpdateEpochStateCallback run",
    ),
    "horovod.ray": Module(
        "ringreduce.ray",
        "BaseHorovodWorker ElasticRayExecutor RayExecutor",
    ),
    "horovod.ray.elastic": Module("ringreduce.ray", "ElasticRayExecutor RayHostDiscovery"),
    "horovod.ray.runner": Module("ringreduce.ray", "RayExecutor"),
    "horovod.runner": Module(
        "ringreduce",
        "run",
    ),
    "horovod.spark": Module(
        "ringreduce.spark",
        "run run_elastic",
    ),
    "horovod.tensorflow": Module(
        "ringreduce.tensorflow",
        "Adasum Average BroadcastGlobalVariablesHook Compression DistributedGradientTape DistributedOptimizer "
        "LocalGradientAggregationHelper Max Min PartialDistributedGradientTape ProcessSet Product Sum "
        "SyncBatchNormalization add_process_set allgather allgather_object allreduce alltoall broadcast "
        "broadcast_ broadcast_global_variables broadcast_object broadcast_object_fn broadcast_variables ccl_built "
        "check_extension check_num_rank_power_of_2 cross_rank cross_size cuda_built ddl_built elastic "
        "global_process_set gloo_built gloo_enabled gpu_available grouped_allgather grouped_allreduce "
        "grouped_reducescatter handle_average_backwards_compatibility init is_homogeneous is_initialized join "
        "local_rank local_rank_op local_size local_size_op mpi_built mpi_enabled mpi_threads_supported nccl_built "
        "process_set_included_op rank rank_op reducescatter refs_to_vars remove_process_set rocm_built shutdown "
        "size size_op split_list start_timeline stop_timeline vars_to_refs",
    ),
    "horovod.tensorflow.compression": Module(
        "ringreduce.compression",
        "Compression Compressor FP16Compressor NoneCompressor",
    ),
    "horovod.tensorflow.data": Module("ringreduce.tensorflow.data", ""),
    "horovod.tensorflow.data.compute_service": Module(
        "ringreduce.tensorflow.data.compute_service",
        "ComputeClient TfDataServiceConfig compute_worker_fn get_env_rank_and_size send_to_data_service "
        "tf_data_service",
    ),
    "horovod.tensorflow.data.compute_worker": Module(
        "ringreduce.tensorflow.data.compute_worker",
        "ComputeService TfDataServiceConfig compute_worker_fn main",
    ),
    "horovod.tensorflow.elastic": Module(
        "ringreduce.tensorflow.elastic",
        "TensorFlowKerasState TensorFlowState run",
    ),
    "horovod.tensorflow.functions": Module(
        "ringreduce.tensorflow",
        "ProcessSet allgather allgather_object broadcast broadcast_ broadcast_object broadcast_object_fn "
        "broadcast_variables global_process_set rank size",
    ),
    "horovod.tensorflow.gradient_aggregation": Module(
        "ringreduce.tensorflow",
        "LocalGradientAggregationHelper apply_op_to_not_none_tensors get_not_none_from_list global_process_set size_op",
    ),
    "horovod.tensorflow.gradient_aggregation_eager": Module(
        "ringreduce.tensorflow",
        "LocalGradientAggregationHelperEager global_process_set size_op",
    ),
    "horovod.tensorflow.keras": Module(
        "ringreduce.tensorflow.keras",
        "Average Compression DistributedOptimizer ProcessSet Sum add_process_set allgather allreduce broadcast "
        "broadcast_global_variables callbacks ccl_built cross_rank cross_size cuda_built ddl_built elastic "
        "global_process_set gloo_built gloo_enabled init is_initialized is_version_greater_equal_than load_model "
        "local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank reducescatter "
        "remove_process_set rocm_built shutdown size start_timeline stop_timeline",
    ),
    "horovod.tensorflow.keras.callbacks": Module(
        "ringreduce.tensorflow.keras.callbacks",
        "BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback "
        "LearningRateWarmupCallback MetricAverageCallback is_version_greater_equal_than",
    ),
    "horovod.tensorflow.keras.elastic": Module(
        "ringreduce.tensorflow.keras.elastic",
        "CommitStateCallback KerasState UpdateBatchStateCallback UpdateEpochStateCallback run",
    ),
    "horovod.tensorflow.mpi_ops": Module(
        "ringreduce.tensorflow",
        "Adasum Average Max Min ProcessSet Product Sum add_process_set allgather alltoall broadcast broadcast_ "
        "ccl_built check_num_rank_power_of_2 cross_rank cross_size cuda_built ddl_built "
        "get_average_backwards_compatibility_fun global_process_set gloo_built gloo_enabled gpu_available "
        "grouped_allgather handle_average_backwards_compatibility init is_homogeneous is_initialized join "
        "local_rank local_rank_op local_size local_size_op mpi_built mpi_enabled mpi_threads_supported nccl_built "
        "num_rank_is_power_2 process_set_included_op rank rank_op remove_process_set rocm_built shutdown size "
        "size_op start_timeline stop_timeline",
    ),
    "horovod.tensorflow.sync_batch_norm": Module(
        "ringreduce.tensorflow",
        "Sum SyncBatchNormalization rank size",
    ),
    "horovod.tensorflow.util": Module(
        "ringreduce.tensorflow",
        "refs_to_vars vars_to_refs",
    ),
    "horovod.torch": Module(
        "ringreduce.torch",
        "Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum "
        "SyncBatchNorm add_process_set allgather allgather_async allgather_object allreduce allreduce_ "
        "allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async "
        "broadcast_async_ broadcast_object broadcast_optimizer_state broadcast_parameters ccl_built "
        "check_extension cross_rank cross_size cuda_built ddl_built elastic global_process_set gloo_built "
        "gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_ "
        "grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init "
        "is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll "
        "rank reducescatter reducescatter_async remove_process_set rocm_built shutdown size "
        "sparse_allreduce_async start_timeline stop_timeline synchronize",
    ),
    "horovod.torch.compression": Module(
        "ringreduce.compression",
        "Compression Compressor FP16Compressor NoneCompressor",
    ),
    "horovod.torch.elastic": Module(
        "ringreduce.torch.elastic",
        "ElasticSampler TorchState run",
    ),
    "horovod.torch.elastic.sampler": Module(
        "ringreduce.torch.elastic ringreduce.torch",
        "ElasticSampler rank size",
    ),
    "horovod.torch.elastic.state": Module(
        "ringreduce.torch.elastic ringreduce.torch",
        "ElasticSampler ModelStateHandler ObjectState OptimizerStateHandler SamplerStateHandler StateHandler "
        "TorchState allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters "
        "get_handler_registry rank set_handler_registry",
    ),
    "horovod.torch.functions": Module(
        "ringreduce.torch",
        "ProcessSet allgather allgather_object broadcast_ broadcast_async_ broadcast_object "
        "broadcast_optimizer_state broadcast_parameters global_process_set rank size synchronize",
    ),
    "horovod.torch.mpi_ops": Module(
        "ringreduce.torch",
        "Adasum Average Compression HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast "
        "HorovodGroupedAllgather HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodInternalError "
        "HorovodReducescatter Max Min ProcessSet Product Sum add_process_set allgather allgather_async allreduce "
        "allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ "
        "broadcast_async broadcast_async_ ccl_built cross_rank cross_size cuda_built ddl_built "
        "get_average_backwards_compatibility_fun global_process_set gloo_built gloo_enabled gpu_available "
        "grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_ grouped_allreduce_async "
        "grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async "
        "handle_average_backwards_compatibility init is_homogeneous is_initialized join local_rank local_size "
        "mpi_built mpi_enabled mpi_threads_supported nccl_built num_rank_is_power_2 poll rank reducescatter "
        "reducescatter_async remove_process_set rocm_built shutdown size sparse_allreduce_async start_timeline "
        "stop_timeline synchronize",
    ),
    "horovod.torch.optimizer": Module(
        "ringreduce.torch",
        "Adasum Average Compression DistributedOptimizer ProcessSet Sum allreduce_async_ broadcast_object "
        "global_process_set grouped_allreduce_async_ rocm_built size sparse_allreduce_async split_list "
        "synchronize",
    ),
    "horovod.torch.sync_batch_norm": Module(
        "ringreduce.torch",
        "Sum SyncBatchNorm allgather_async allreduce_async size synchronize",
    ),
}
"""By its name in Horovod."""

MXNET = (
    "MXNet was archived in 2023, and its last release, 1.9.1 of 2022, needs a NumPy older than 1.24; its arrays work "
    "as NumPy arrays: ringreduce.allreduce(array.asnumpy())"
)
_RINGRUN = "ranks are started by `ringrun`, or from Python by ringreduce.run(function, np=N)"
_RAY = "ringreduce.ray has RayExecutor, ElasticRayExecutor, and run(function, np=N)"
_SPARK = (
    "ringreduce.spark has run and run_elastic, and rank for mapInArrow; there are no estimators, see docs/choose.md"
)
WITHOUT = {
    "horovod.mxnet": MXNET,
    "horovod.ray": _RAY,
    "horovod.runner": _RINGRUN,
    "horovod.spark": _SPARK,
}
"""Modules of Horovod's of which nothing is here, those below them too, and what to use instead."""

_CHECK_BUILD = "`ringrun --check-build` prints what was found"
_OF_TF1 = (
    "it belongs to TensorFlow 1; in ringreduce.tensorflow and ringreduce.keras use broadcast_variables(variables, "
    "root_rank), elsewhere broadcast_parameters(params, root_rank)"
)
_INTERNAL = "it is internal to Horovod, and nothing here needs it"
_STATE = "a state takes any object with state_dict() and load_state_dict(), which needs no handler"
_AUTOGRAD = "call the function, such as allreduce(tensor): autograd goes through it"
_ACCUMULATES = "pass backward_passes_per_step to DistributedOptimizer"
_LOADER = "use torch.utils.data.DataLoader, whose workers load ahead"
INSTEAD = {
    "AsyncDataLoaderMixin BaseDataLoader": _LOADER,
    "BroadcastGlobalVariablesHook broadcast_global_variables": _OF_TF1,
    "BaseHorovodWorker": _INTERNAL,
    "RayHostDiscovery": "Ray itself tells ElasticRayExecutor which hosts there are; leave settings.discovery out",
    "HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast HorovodGroupedAllgather": _AUTOGRAD,
    "HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter": _AUTOGRAD,
    "HorovodBasics": "rank(), size() and the like are functions of ringreduce, and of each framework's module",
    "HorovodVersionMismatchError check_extension extension_available": _CHECK_BUILD,
    "HostUpdateResult WorkerNotificationManager notification_manager": _INTERNAL,
    "LocalGradientAggregationHelper LocalGradientAggregationHelperEager": _ACCUMULATES,
    "ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler": _STATE,
    "apply_op_to_not_none_tensors get_not_none_from_list refs_to_vars vars_to_refs split_list is_iterable": _INTERNAL,
    "broadcast_object_fn": "it belongs to TensorFlow 1; use broadcast_object(obj, root_rank)",
    "callbacks": "they are for Keras, in ringreduce.keras.callbacks",
    "check_num_rank_power_of_2 num_rank_is_power_2 is_version_greater_equal_than": _INTERNAL,
    "get_average_backwards_compatibility_fun handle_average_backwards_compatibility": _INTERNAL,
    "get_handler_registry set_handler_registry": _STATE,
    "get_env_rank_and_size": "use rank() and size()",
    "gpu_available": "use cuda_built()",
    "keras": "use import ringreduce.keras",
    "mpi_ops compression functions optimizer": "what Horovod has there stands beside rank() and size() here",
    "mxnet": MXNET,
    "ray": f"use import ringreduce.ray: {_RAY}",
    "run_elastic": "it is in ringreduce.spark; elsewhere start a script with `ringrun --elastic -np N python train.py`",
    "run_fn": "use ringreduce.elastic.run",
    "spark": f"use import ringreduce.spark: {_SPARK}",
    "tensorflow": "use import ringreduce.tensorflow",
    "torch": "use import ringreduce.torch",
}
"""What to use in place of names that no module here has."""


@functools.cache
def instead() -> dict[str, str]:
    """INSTEAD by single names."""
    return {name: text for names, text in INSTEAD.items() for name in names.split()}


def no_attribute(module: str, name: str, frame: FrameType | None = None) -> AttributeError | ImportError:
    """The error for a name that a module lacks; for `from module import name` an ImportError, which Python shows.

    Of an AttributeError it would make its own ImportError there, without the text.

    frame: which wants the name; by default the one that has called a `__getattr__`.
    """
    text = f": {instead()[name]}" if name in instead() else ""
    frame = frame or sys._getframe(1)
    while frame and frame.f_code.co_name in ("__getattr__", "missing"):
        frame = frame.f_back
    if frame and text and frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name {name!r} from {module!r}{text}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}{text}", name=name)


def end_of(module: dict[str, Any]) -> tuple[list[str], Callable[[str], NoReturn]]:
    """The `__all__` of a framework's module, all its public names but modules, and its `__getattr__`."""

    def missing(name: str) -> NoReturn:
        raise no_attribute(module["__name__"], name)

    return [name for name, it in module.items() if name[0] != "_" and not isinstance(it, ModuleType)], missing
