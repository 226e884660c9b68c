"""What answers an Open MPI: PMIx, the library that it has loaded, which has its launcher's half, too.

That half answers the ranks of one host by itself, without a callback. On several hosts each would need one, whose
callback fence_nb gets what its ranks tell the others, and a link that carries that between hosts: not written.
Source: The PMIx Standard 5, chapters on the server's interfaces; calls, structures and numbers are of its stable ABI.
        Tried with PMIx 5.0.11, which comes with the wheel of Open MPI 5.0.11.
"""

import ctypes
import itertools
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ..connection import wire
from ..engines.openmpi import OpenMPI

_STRING, _UINT32 = 3, 14  # pmix_data_type_t
_OK = (0, -157)  # PMIX_SUCCESS, PMIX_OPERATION_SUCCEEDED: without a callback later
_PROC, _ARRAY = struct.Struct("256sI"), struct.Struct("HNP")  # pmix_proc_t, a rank; pmix_data_array_t
_NO_CALLBACKS = bytes(1024)  # pmix_server_module_t, which grows


def serve(ranks: Sequence[wire.Joining], name: str, folder: str) -> list[dict[str, str]]:
    """Answer the MPI of these ranks for as long as this process lives; returns each one's variables.

    name: of their world.  folder: for files.
    Raises: OSError where it cannot, with what to do instead.
    """
    size = len(ranks)
    try:
        if len({(each.host, each.boot, each.pmix) for each in ranks}) > 1:
            hosts, files = dict.fromkeys(of.host for of in ranks), dict.fromkeys(of.pmix or "none" for of in ranks)
            raise OSError(f"these are on {', '.join(hosts)}, and load {', '.join(files)}")
        pmix = ctypes.CDLL(ranks[0].pmix)
        host, numbers = socket.gethostname(), ",".join(map(str, range(size)))
        _call(pmix.PMIx_server_init, _NO_CALLBACKS, *_infos(pmix, {"srvr.tmpdir": folder, "hname": host}))
        job = _infos(pmix, {"nmap": host, "pmap": numbers, "job.size": size, "univ.size": size, "nsdir": folder})
        _call(pmix.PMIx_server_register_nspace, name.encode(), size, *job, None, None)
        return [_variables(pmix, _PROC.pack(name.encode(), rank)) | _of_mpirun(rank, size) for rank in range(size)]
    except (OSError, AttributeError) as error:  # as where a call is missing
        raise OSError(
            f"Open MPI's ranks can be joined on one host, where all load the same PMIx; {error}; pip uninstall openmpi "
            f"&& pip install mpich, or start with: ringrun -np {size} python train.py"
        ) from error


def _of_mpirun(rank: int, size: int) -> dict[str, str]:
    """Return what mpirun would say of it."""
    return dict(zip(OpenMPI.rank_variables, map(str, (rank, size, rank, size)), strict=True))


def _infos(pmix: Any, values: dict[str, str | int]) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    """Return an array of pmix_info_t, whose keys begin with "pmix.", and its length; it is never freed."""
    pmix.PMIx_Info_list_start.restype = ctypes.c_void_p
    made, array = ctypes.c_void_p(pmix.PMIx_Info_list_start()), ctypes.create_string_buffer(_ARRAY.size)
    for key, value in values.items():
        of = (value.encode(), _STRING) if isinstance(value, str) else (ctypes.byref(ctypes.c_uint32(value)), _UINT32)
        _call(pmix.PMIx_Info_list_add, made, f"pmix.{key}".encode(), *of)
    _call(pmix.PMIx_Info_list_convert, made, array)
    _, length, first = _ARRAY.unpack(array.raw)
    return ctypes.c_void_p(first), ctypes.c_size_t(length)


def _variables(pmix: Any, proc: bytes) -> dict[str, str]:
    """Expect a rank, and return the variables by which its MPI comes here."""
    _call(pmix.PMIx_server_register_client, proc, os.getuid(), os.getgid(), None, None, None)
    lines = ctypes.POINTER(ctypes.c_char_p)()
    _call(pmix.PMIx_server_setup_fork, proc, ctypes.byref(lines))
    found = itertools.takewhile(bool, (lines[number] for number in itertools.count()))
    return dict(os.fsdecode(line).split("=", 1) for line in found)


def _call(function: Callable[..., int], *arguments: object) -> None:
    if (status := function(*arguments)) not in _OK:
        raise OSError(f"{function.__name__} returned {status}")
