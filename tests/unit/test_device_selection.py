"""Which GPU a rank gets, by a small stand-in for what CuPy and torch show and do."""

import os
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ringreduce.errors import SettingsError
from ringreduce.gpu.device_selection import LOCAL_RANKS, NOT_ASKED, Choice, chosen, select
from ringreduce.settings import Settings

BUS_IDS = ["0000:3B:00.0", "0000:5E:00.0", "0001:3B:00.0"]
"""As CUDA writes them, and not in the order of PCI's: the third is the fastest on no list."""


class FakeCuda:
    """A driver that shows some GPUs, and the current one of the calling thread in one library."""

    def __init__(self, bus_ids):
        self.bus_ids = bus_ids
        self.now = 0
        self.used = []

    def use(self, index):
        assert 0 <= index < len(self.bus_ids)
        self.now = index
        self.used.append(index)


class CUDARuntimeError(RuntimeError):
    pass


@pytest.fixture
def absent(monkeypatch):
    """A script that has imported neither."""
    for name in ("cupy", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def imported_cupy(absent, monkeypatch):
    """What makes a CuPy that sees these GPUs; with none of them it raises, as CuPy does."""

    def make(bus_ids):
        cuda, module = FakeCuda(bus_ids), ModuleType("cupy")

        def count():
            if not bus_ids:
                raise CUDARuntimeError("cudaErrorInsufficientDriver")
            return len(bus_ids)

        module.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDeviceCount=count,
                getDevice=lambda: cuda.now,
                deviceGetPCIBusId=lambda index: bus_ids[index],
            ),
            Device=lambda index: SimpleNamespace(use=lambda: cuda.use(index)),
        )
        monkeypatch.setitem(sys.modules, "cupy", module)
        return cuda

    return make


@pytest.fixture
def imported_torch(absent, monkeypatch):
    """What makes a torch that sees these GPUs; an older one does not tell their bus ids."""

    def properties(bus_id, tells):
        domain, bus, device = (int(part, 16) for part in bus_id[:-2].split(":"))
        told = {"pci_domain_id": domain, "pci_bus_id": bus, "pci_device_id": device} if tells else {}
        return SimpleNamespace(name="NVIDIA H200", **told)

    def make(bus_ids, tells=True):
        cuda, module = FakeCuda(bus_ids), ModuleType("torch")
        module.cuda = SimpleNamespace(
            is_available=lambda: bool(bus_ids),
            device_count=lambda: 3,  # without a driver that works NVIDIA's management library may still count them
            get_device_properties=lambda index: properties(bus_ids[index], tells),
            current_device=lambda: cuda.now,
            set_device=cuda.use,
        )
        monkeypatch.setitem(sys.modules, "torch", module)
        return cuda

    return make


def refusal(settings, environ=None, bus_ids=BUS_IDS):
    with pytest.raises(SettingsError) as caught:
        chosen(settings, environ or {}, bus_ids)
    return str(caught.value)


@pytest.mark.parametrize("variable", LOCAL_RANKS)
@pytest.mark.parametrize(("rank", "index"), [(0, 0), (1, 1), (2, 2), (3, 0), (7, 1)])
def test_local_ranks_get_the_gpus_in_turn(variable, rank, index):
    assert chosen(Settings(), {variable: str(rank)}, BUS_IDS) == Choice(index, f"{variable}={rank}, of 3 GPUs")


def test_whoever_started_the_rank_counts_more_than_the_slurm_job_around_it():
    environ = {"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}
    assert chosen(Settings(), environ, BUS_IDS).index == 1
    assert chosen(Settings(), {**environ, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, BUS_IDS).index == 2
    assert chosen(Settings(), {**environ, "MPI_LOCALRANKID": "2"}, BUS_IDS).index == 2


def test_a_script_that_no_launcher_has_started_keeps_its_gpu():
    assert chosen(Settings(), {}, BUS_IDS).index is None
    assert chosen(Settings(), {"LOCAL_RANK": "one"}, BUS_IDS).index is None


@pytest.mark.parametrize(
    ("bus_id", "index"),
    [("0000:3b:00.0", 0), ("00000000:5E:00.0", 1), ("0001:3b:00.0", 2)],
)
def test_where_ringrun_has_placed_a_rank_counts_more_than_its_local_rank(bus_id, index):
    environ = {"LOCAL_RANK": str(index + 1)}
    choice = chosen(Settings(placed_gpu=bus_id), environ, BUS_IDS)
    assert choice == Choice(index, f"ringrun has placed this rank on {bus_id}")


def test_a_rank_whose_gpu_cuda_does_not_show_goes_by_its_local_rank():
    choice = chosen(Settings(placed_gpu="0000:3c:00.0"), {"LOCAL_RANK": "1"}, BUS_IDS)
    assert choice == Choice(1, "LOCAL_RANK=1, of 3 GPUs, since CUDA does not show 0000:3c:00.0")
    masked = chosen(Settings(placed_gpu="0000:5e:00.0"), {"LOCAL_RANK": "1"}, ["0000:5E:00.0"])
    assert masked == Choice(0, "ringrun has placed this rank on 0000:5e:00.0")
    part_of_one = chosen(Settings(), {"LOCAL_RANK": "1"}, ["0000:5E:00.0"])
    assert part_of_one == Choice(0, "LOCAL_RANK=1, of 1 GPU")


@pytest.mark.parametrize(("asked", "index"), [("2", 2), ("0", 0), ("0000:5e:00.0", 1)])
def test_the_setting_counts_more_than_ringrun(asked, index):
    settings = Settings(cuda_device=asked, placed_gpu="0000:3b:00.0")
    assert chosen(settings, {"LOCAL_RANK": "1"}, BUS_IDS) == Choice(index, f"RINGREDUCE_CUDA_DEVICE={asked}")


@pytest.mark.parametrize("asked", ["3", "99", "0000:3c:00.0"])
def test_a_gpu_that_is_not_there_is_refused(asked):
    there = "0 (0000:3B:00.0), 1 (0000:5E:00.0), 2 (0001:3B:00.0)"
    what_to_do = "name one of these, or unset it to give each rank of a host the next one"
    settings = Settings(cuda_device=asked)
    assert refusal(settings) == (
        f"RINGREDUCE_CUDA_DEVICE={asked}: the GPUs that this process sees are {there}; {what_to_do}"
    )
    assert "this process sees with CUDA_VISIBLE_DEVICES=2 are 0 (of unknown bus id)" in refusal(
        settings, {"CUDA_VISIBLE_DEVICES": "2"}, [""]
    )


def test_what_the_script_has_made_current_itself_stays():
    own = Choice(2, "the script's own choice before init()")
    for settings in (Settings(), Settings(cuda_device="1"), Settings(placed_gpu="0000:3b:00.0")):
        assert chosen(settings, {"LOCAL_RANK": "1"}, BUS_IDS, own=2) == own
    with pytest.raises(SettingsError):
        chosen(Settings(cuda_device="3"), {}, BUS_IDS, own=2)


def test_cupy_and_torch_get_the_same_gpu(imported_cupy, imported_torch):
    cupy, torch = imported_cupy(BUS_IDS), imported_torch(BUS_IDS)
    choice = select(Settings(placed_gpu="0001:3b:00.0"), {"LOCAL_RANK": "0"})
    assert (choice.index, cupy.used, torch.used) == (2, [2], [2])


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_one_of_them_is_enough(library, request):
    cuda = request.getfixturevalue(f"imported_{library}")(BUS_IDS)
    assert select(Settings(placed_gpu="0000:5e:00.0"), {"LOCAL_RANK": "2"}).index == 1
    assert (cuda.used, set(sys.modules) & {"cupy", "torch"}) == ([1], {library})


@pytest.mark.parametrize("chooser", ["cupy", "torch"])
def test_the_script_s_own_choice_in_one_library_counts_in_both(chooser, imported_cupy, imported_torch):
    cudas = {"cupy": imported_cupy(BUS_IDS), "torch": imported_torch(BUS_IDS)}
    cudas[chooser].now = 1
    assert select(Settings(), {"LOCAL_RANK": "2"}).index == 1
    assert {name: cuda.now for name, cuda in cudas.items()} == {"cupy": 1, "torch": 1}


def test_a_torch_that_tells_no_bus_ids_goes_by_local_rank(imported_torch):
    cuda = imported_torch(BUS_IDS, tells=False)
    choice = select(Settings(placed_gpu="0000:5e:00.0"), {"LOCAL_RANK": "2"})
    assert (choice.index, cuda.used) == (2, [2])


@pytest.mark.parametrize("asked", ["", "1"])
def test_without_a_gpu_nothing_happens(asked, imported_cupy, imported_torch):
    cupy, torch = imported_cupy([]), imported_torch([])
    assert select(Settings(cuda_device=asked), {"LOCAL_RANK": "1"}) == Choice(None, "no GPU here")
    assert cupy.used == torch.used == []


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_gpu_that_cannot_be_used_fails_no_job_that_may_not_need_it(library, request, monkeypatch):
    cuda = request.getfixturevalue(f"imported_{library}")(BUS_IDS)

    def busy(index):
        raise CUDARuntimeError("cudaErrorDevicesUnavailable")

    monkeypatch.setattr(cuda, "use", busy)
    monkeypatch.setattr(sys.modules[library].cuda, "set_device", busy, raising=False)
    assert select(Settings(), {"LOCAL_RANK": "1"}) == Choice(None, "CUDA says: cudaErrorDevicesUnavailable")


@pytest.mark.parametrize("asked", ["", "1"])
def test_what_the_script_has_not_imported_is_not_imported(asked, absent):
    assert select(Settings(cuda_device=asked), {"LOCAL_RANK": "1"}) is NOT_ASKED
    assert not {"cupy", "torch"} & set(sys.modules)


def test_importing_ringreduce_asks_for_no_gpu_library():
    program = "import sys, ringreduce; print({'cupy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


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


def run_alone(program, tmp_path, **variables):
    """A job of one rank, which no launcher has started, where the file cupy.py stands in for CuPy."""
    (tmp_path / "cupy.py").write_text(LIBRARY)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), **variables}
    return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=50)


def test_init_chooses_before_mpi_starts_and_info_tells(tmp_path):
    program = "import mpi4py; mpi4py.rc.initialize = False; import cupy" + ASK + "assert cupy.cuda.runtime.now == 1"
    done = run_alone(program, tmp_path, RINGREDUCE_PLACED_GPU="0000:5e:00.0")
    assert done.returncode == 0, done.stderr
    first, *table, last = done.stdout.splitlines()
    assert first == last == "1 (ringrun has placed this rank on 0000:5e:00.0)"
    assert any(re.fullmatch(rf"gpu +{re.escape(first)}", line) for line in table)


def test_a_job_that_has_not_imported_cupy_is_told_so(tmp_path):
    done = run_alone("import sys" + ASK + "assert 'cupy' not in sys.modules", tmp_path, RINGREDUCE_CUDA_DEVICE="7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "none (neither CuPy nor torch was imported before init())"


def test_init_refuses_a_gpu_that_is_not_there(tmp_path):
    done = run_alone("import cupy" + ASK, tmp_path, RINGREDUCE_CUDA_DEVICE="2")
    assert done.returncode != 0
    assert (
        "SettingsError: RINGREDUCE_CUDA_DEVICE=2: the GPUs that this process sees are 0 (0000:3B:00.0)" in done.stderr
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, [False, False]),
        ({"cupy.py": "raise SystemExit('it was imported')"}, [True, None]),
        ({"cupy/__init__.py": "", "cupy/cuda/__init__.py": "", "cupy/cuda/nccl.py": "available = True"}, [True, True]),
        (
            {
                "cupy/__init__.py": "",
                "cupy/cuda/__init__.py": "",
                "cupy/cuda/nccl.py": "import warnings; warnings.warn('no NCCL'); available = False",
            },
            [True, False],
        ),
        ({"cupy/__init__.py": "raise ImportError('no libnvrtc')"}, [True, False]),
    ],
    ids=["no CuPy", "not imported", "NCCL", "no NCCL", "broken"],
)
def test_what_is_built_in_for_gpus(files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    hide = "" if files else "import sys; sys.modules['cupy'] = None; "  # where the tests' own Python has one
    asked = "rr.cuda_built(), rr.nccl_built()" if expected[1] is not None else "rr.cuda_built(), None"
    program = f"{hide}import ringreduce as rr; print([{asked}])"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50)
    assert done.stdout == f"{expected}\n", done.stderr
