"""Which GPU a rank gets, by a small stand-in for what CuPy and torch show and do."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ringreduce.arrays.device_selection import LOCAL_RANKS, NOT_ASKED, Choice, chosen, select
from ringreduce.errors import SettingsError
from ringreduce.settings import Settings
from tests.support.loops import in_a_loop
from tests.support.patience import patient

BUS_IDS = ["0000:3B:00.0", "0000:5E:00.0", "0001:3B:00.0"]
"""As CUDA writes them, and not in the order of PCI's: the third is the fastest on no list."""


class FakeCuda:
    """A driver that shows some GPUs, and the current one of the calling thread in one library."""

    def __init__(self, bus_ids):
        self.bus_ids, self.now, self.used = bus_ids, 0, []

    def use(self, index):
        assert 0 <= index < len(self.bus_ids)
        self.now = index
        self.used.append(index)


class CUDARuntimeError(RuntimeError):
    pass


def cupy_of(cuda):
    """With no GPU it raises, as CuPy does."""

    def count():
        if not cuda.bus_ids:
            raise CUDARuntimeError("cudaErrorInsufficientDriver")
        return len(cuda.bus_ids)

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=count,
        getDevice=lambda: cuda.now,
        deviceGetPCIBusId=cuda.bus_ids.__getitem__,
    )
    return SimpleNamespace(runtime=runtime, Device=lambda index: SimpleNamespace(use=lambda: cuda.use(index)))


def torch_of(cuda, tells=True):
    """An older one does not tell the bus ids."""

    def properties(index):
        domain, bus, device = (int(part, 16) for part in cuda.bus_ids[index][:-2].split(":"))
        told = {"pci_domain_id": domain, "pci_bus_id": bus, "pci_device_id": device} if tells else {}
        return SimpleNamespace(name="NVIDIA H200", **told)

    return SimpleNamespace(
        is_available=lambda: bool(cuda.bus_ids),
        device_count=lambda: 3,  # without a driver that works NVIDIA's management library may still count them
        get_device_properties=properties,
        current_device=lambda: cuda.now,
        set_device=lambda index: cuda.use(index),
    )


@pytest.fixture
def imported(monkeypatch):
    """imported("cupy"): a script has imported that library, which sees GPUs; what it does with them."""
    for name in ("cupy", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def make(name, bus_ids=BUS_IDS, **options):
        cuda = FakeCuda(bus_ids)
        module = SimpleNamespace(cuda={"cupy": cupy_of, "torch": torch_of}[name](cuda, **options))
        monkeypatch.setitem(sys.modules, name, module)
        return cuda

    return make


@in_a_loop("variable", LOCAL_RANKS)
@in_a_loop(("rank", "index"), [(0, 0), (1, 1), (2, 2), (3, 0), (7, 1)])
def test_local_ranks_get_the_gpus_in_turn(variable, rank, index):
    assert chosen(Settings(), {variable: str(rank)}, BUS_IDS) == Choice(index, f"{variable}={rank}, of 3 GPUs")


SLURM_S = {"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}
MASKED = ["0000:5E:00.0"]


def placed(bus_id):
    return Settings(placed_gpu=bus_id), f"ringrun has placed this rank on {bus_id}"


def asked(device):
    return Settings(cuda_device=device, placed_gpu="0000:3b:00.0"), f"RINGREDUCE_CUDA_DEVICE={device}"


NOT_SHOWN = Settings(placed_gpu="0000:3c:00.0"), "LOCAL_RANK=1, of 3 GPUs, since CUDA does not show 0000:3c:00.0"
BY_RANK = Settings(), None


@in_a_loop(
    ("expected", "environ", "bus_ids", "index"),
    [
        # whoever started the rank counts more than the Slurm job around it
        (BY_RANK, SLURM_S, BUS_IDS, 1),
        (BY_RANK, SLURM_S | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, BUS_IDS, 2),
        (BY_RANK, SLURM_S | {"MPI_LOCALRANKID": "2"}, BUS_IDS, 2),
        # a script that no launcher has started keeps its GPU
        (BY_RANK, {}, BUS_IDS, None),
        (BY_RANK, {"LOCAL_RANK": "one"}, BUS_IDS, None),
        # where ringrun has placed a rank counts more than its local rank, if CUDA shows it
        (placed("0000:3b:00.0"), {"LOCAL_RANK": "1"}, BUS_IDS, 0),
        (placed("00000000:5E:00.0"), {"LOCAL_RANK": "2"}, BUS_IDS, 1),
        (placed("0001:3b:00.0"), {"LOCAL_RANK": "3"}, BUS_IDS, 2),
        (placed("0000:5e:00.0"), {"LOCAL_RANK": "1"}, MASKED, 0),
        (NOT_SHOWN, {"LOCAL_RANK": "1"}, BUS_IDS, 1),
        ((Settings(), "LOCAL_RANK=1, of 1 GPU"), {"LOCAL_RANK": "1"}, MASKED, 0),
        # the setting counts more than ringrun
        (asked("2"), {"LOCAL_RANK": "1"}, BUS_IDS, 2),
        (asked("0"), {"LOCAL_RANK": "1"}, BUS_IDS, 0),
        (asked("0000:5e:00.0"), {"LOCAL_RANK": "1"}, BUS_IDS, 1),
    ],
)
def test_what_counts_more(expected, environ, bus_ids, index):
    settings, why = expected
    choice = chosen(settings, environ, bus_ids)
    assert (choice.index, choice.why if why else None) == (index, why)


@pytest.mark.parametrize("asked", ["3", "99", "0000:3c:00.0"])
def test_a_gpu_that_is_not_there_is_refused(asked):
    there = "0 (0000:3B:00.0), 1 (0000:5E:00.0), 2 (0001:3B:00.0)"
    what_to_do = "name one of these, or unset it, and the ranks of a host take the GPUs in turn"
    message = f"RINGREDUCE_CUDA_DEVICE={asked}: the GPUs that this process sees are {there}; {what_to_do}"
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        chosen(Settings(cuda_device=asked), {}, BUS_IDS)
    with pytest.raises(SettingsError, match=r"sees with CUDA_VISIBLE_DEVICES=2 are 0 \(of unknown bus id\)"):
        chosen(Settings(cuda_device=asked), {"CUDA_VISIBLE_DEVICES": "2"}, [""])


def test_what_the_script_has_made_current_itself_stays():
    own = Choice(2, "the script's own choice before init()")
    for settings in (Settings(), Settings(cuda_device="1"), Settings(placed_gpu="0000:3b:00.0")):
        assert chosen(settings, {"LOCAL_RANK": "1"}, BUS_IDS, own=2) == own
    with pytest.raises(SettingsError):
        chosen(Settings(cuda_device="3"), {}, BUS_IDS, own=2)


def test_cupy_and_torch_get_the_same_gpu(imported):
    cupy, torch = imported("cupy"), imported("torch")
    choice = select(Settings(placed_gpu="0001:3b:00.0"), {"LOCAL_RANK": "0"})
    assert (choice.index, cupy.used, torch.used) == (2, [2], [2])


@pytest.mark.parametrize("chooser", ["cupy", "torch"])
def test_the_script_s_own_choice_in_one_library_counts_in_both(chooser, imported):
    cudas = {name: imported(name) for name in ("cupy", "torch")}
    cudas[chooser].now = 1
    assert select(Settings(), {"LOCAL_RANK": "2"}).index == 1
    assert {name: cuda.now for name, cuda in cudas.items()} == {"cupy": 1, "torch": 1}


def test_a_torch_that_tells_no_bus_ids_goes_by_local_rank(imported):
    cuda = imported("torch", tells=False)
    choice = select(Settings(placed_gpu="0000:5e:00.0"), {"LOCAL_RANK": "2"})
    assert (choice.index, cuda.used) == (2, [2])


@pytest.mark.parametrize("asked", ["", "1"])
def test_without_a_gpu_nothing_happens(asked, imported):
    cupy, torch = imported("cupy", []), imported("torch", [])
    assert select(Settings(cuda_device=asked), {"LOCAL_RANK": "1"}) == Choice(None, "no GPU here")
    assert cupy.used == torch.used == []


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_gpu_that_cannot_be_used_fails_no_job_that_may_not_need_it(library, imported):
    """The one library that is imported."""

    def busy(index):
        raise CUDARuntimeError("cudaErrorDevicesUnavailable")

    imported(library).use = busy
    assert select(Settings(), {"LOCAL_RANK": "1"}) == Choice(None, "CUDA says: cudaErrorDevicesUnavailable")


@pytest.mark.parametrize("asked", ["", "1"])
def test_what_the_script_has_not_imported_is_not_imported(asked, imported):
    assert select(Settings(cuda_device=asked), {"LOCAL_RANK": "1"}) is NOT_ASKED
    assert not {"cupy", "torch"} & set(sys.modules)


ASK = """
import ringreduce as rr
rr.init()
print(rr.info().gpu)
print(rr.info())
rr.shutdown()
rr.init()
print(rr.info().gpu)
"""

LIBRARY = """
class CUDARuntimeError(RuntimeError): pass
class cuda:
    class runtime:
        CUDARuntimeError = CUDARuntimeError
        now = 0
        getDeviceCount = staticmethod(lambda: 2)
        getDevice = staticmethod(lambda: cuda.runtime.now)
        deviceGetPCIBusId = staticmethod(["0000:3B:00.0", "0000:5E:00.0"].__getitem__)
    class Device:
        def __init__(self, index): self.index = index
        def use(self):
            from mpi4py import MPI
            assert not MPI.Is_initialized(), "the GPU is chosen too late"
            cuda.runtime.now = self.index
"""


def run_alone(program, folder, files, **variables):
    """A process that no launcher has started, which finds these files of a stand-in for CuPy."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), **variables}
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patient(50))


def test_init_chooses_before_mpi_starts_and_info_tells(tmp_path):
    program = "import mpi4py; mpi4py.rc.initialize = False; import cupy" + ASK + "assert cupy.cuda.runtime.now == 1"
    done = run_alone(program, tmp_path, {"cupy.py": LIBRARY}, RINGREDUCE_PLACED_GPU="0000:5e:00.0")
    assert done.returncode == 0, done.stderr
    first, *table, last = done.stdout.splitlines()
    assert first == last == "1 (ringrun has placed this rank on 0000:5e:00.0)"
    assert any(re.fullmatch(rf"gpu +{re.escape(first)}", line) for line in table)


def test_a_job_that_has_not_imported_cupy_is_told_so(tmp_path):
    program = "import sys" + ASK + "assert 'cupy' not in sys.modules"
    done = run_alone(program, tmp_path, {"cupy.py": LIBRARY}, RINGREDUCE_CUDA_DEVICE="7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "none (neither CuPy nor torch was imported before init())"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, [False, 0]),
        ({"cupy.py": "raise SystemExit('it was imported')"}, [True, None]),
        (
            {
                "cupy/__init__.py": "",
                "cupy/cuda/__init__.py": "",
                "cupy/cuda/nccl.py": "available = True\ndef get_version(): return 22703",
            },
            [True, 22703],
        ),
        (
            {
                "cupy/__init__.py": "",
                "cupy/cuda/__init__.py": "",
                "cupy/cuda/nccl.py": "import warnings; warnings.warn('no NCCL'); available = False",
            },
            [True, 0],
        ),
        ({"cupy/__init__.py": "raise ImportError('no libnvrtc')"}, [True, 0]),
    ],
    ids=["no CuPy", "not imported", "NCCL", "no NCCL", "broken"],
)
def test_what_is_built_in_for_gpus(files, expected, tmp_path):
    hide = "" if files else "import sys; sys.modules['cupy'] = None; "  # where the tests' own Python has one
    asked = "rr.cuda_built(), rr.nccl_built(verbose=True)" if expected[1] is not None else "rr.cuda_built(), None"
    program = f"{hide}import ringreduce as rr; print([{asked}])"
    done = run_alone(program, tmp_path, files)
    assert done.stdout == f"{expected}\n", done.stderr
