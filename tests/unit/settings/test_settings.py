import collections

import pytest

from ringreduce.errors import SettingsError
from ringreduce.settings import HOROVOD, LEAST_FUSION_BYTES, Checks, Settings, horovod_notice

READ = {
    "FUSION_SLOT_BYTES": ("1024", 1024),
    "ERROR_FILE": ("/tmp/e", "/tmp/e"),
    "STALL_CHECK_S": ("2.5", 2.5),
    "DYNAMIC_PROCESS_SETS": ("1", True),
    "CACHE_CAPACITY": ("0", 0),
    "CUDA_DEVICE": ("0000:3b:00.0", "0000:3b:00.0"),
    "CUDA_SLOT_BYTES": ("512", 512),
    "CUDA_IPC": ("0", False),
    "CUDA_AWARE_MPI": ("1", True),
}
HOROVODS = {
    "TIMELINE": ("/tmp/t.json", {"timeline": "/tmp/t.json"}),
    "TIMELINE_MARK_CYCLES": ("1", {"timeline_mark_cycles": True}),
    "STALL_CHECK_TIME_SECONDS": ("60", {}),  # ours counts
    "STALL_SHUTDOWN_TIME_SECONDS": ("120", {"stall_abort_s": 120}),
    "CYCLE_TIME": ("3.5", {"cycle_time_ms": 3.5}),
    "CACHE_CAPACITY": ("7", {"cache_capacity": 7}),
    "DYNAMIC_PROCESS_SETS": ("1", {"dynamic_process_sets": True}),
    "FUSION_THRESHOLD": ("134217728", {"fusion_buffer_bytes": 128 << 20}),
}
EACH_ALONE = {
    "HOROVOD_FUSION_THRESHOLD": ("33554432", "fusion_buffer_bytes", 32 << 20),
    "HOROVOD_CYCLE_TIME": ("1.5", "cycle_time_ms", 1.5),
    "HOROVOD_CACHE_CAPACITY": ("2048", "cache_capacity", 2048),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("61", "stall_check_s", 61.0),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("121", "stall_abort_s", 121.0),
    "HOROVOD_DYNAMIC_PROCESS_SETS": ("1", "dynamic_process_sets", True),
    "HOROVOD_TIMELINE": ("/tmp/timeline.json", "timeline", "/tmp/timeline.json"),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("1", "timeline_mark_cycles", True),
    "HOROVOD_LOG_LEVEL": ("DEBUG", "log_level", "debug"),
    "HOROVOD_LOG_TIMESTAMP": ("1", "log_timestamp", True),
}
"""Horovod's names, as its documentation has them: a text, and the one setting that it changes."""


def test_defaults_and_variables():
    assert Settings.from_environment({"HOME": "/root"}) == Settings()
    settings = Settings.from_environment({f"RINGREDUCE_{name}": text for name, (text, _) in READ.items()})
    assert settings == Settings(**{name.lower(): value for name, (_, value) in READ.items()})


def test_horovods_variables_are_understood_and_ours_count():
    variables = {f"HOROVOD_{name}": text for name, (text, _) in HOROVODS.items()} | {"RINGREDUCE_STALL_CHECK_S": "5"}
    expected = dict(collections.ChainMap(*(changed for _, changed in HOROVODS.values())), stall_check_s=5)
    assert Settings.from_environment(variables) == Settings(**expected)
    assert Settings.from_environment({"HOROVOD_FUSION_THRESHOLD": "0"}).fusion_buffer_bytes == LEAST_FUSION_BYTES


def test_each_of_horovods_variables_sets_what_it_means_and_nothing_else():
    assert set(EACH_ALONE) == set(HOROVOD)
    for variable, (text, name, value) in EACH_ALONE.items():
        assert Settings.from_environment({variable: text}) == Settings(**{name: value}) != Settings(), variable


@pytest.mark.parametrize(
    ("variable", "texts", "expected"),
    [
        (
            "RINGREDUCE_RING_SEGMENT_BYTES",
            ["", "0", "-1", "1.5", "1MiB"],
            r"a whole number of bytes above 0, such as \d+",
        ),
        ("RINGREDUCE_CACHE_CAPACITY", ["-1", "x"], r"a whole number of tensors of 0 or more, such as \d+"),
        ("RINGREDUCE_RESTART_COUNT", ["-1", "x"], r"a whole number of restarts of 0 or more, such as \d+"),
        ("RINGREDUCE_STALL_CHECK_S", ["-1", "nan", "inf", "soon"], r"a number of seconds of 0 or more, such as 10.0"),
        ("HOROVOD_FUSION_THRESHOLD", ["-1", "64MB"], r"a whole number of bytes of 0 or more, such as 134217728"),
        ("HOROVOD_CYCLE_TIME", ["-1", "x"], r"a number of milliseconds of 0 or more, such as 50.0"),
        ("RINGREDUCE_DYNAMIC_PROCESS_SETS", ["2", "maybe"], "1 or 0"),
    ],
)
def test_a_value_that_does_not_parse_is_refused(variable, texts, expected):
    for text in texts:
        with pytest.raises(SettingsError, match=rf"{variable}='{text}': expected {expected}"):
            Settings.from_environment({variable: text})


@pytest.mark.parametrize(
    ("texts", "value"), [(["1", "true", "True", "YES", "on"], True), (["", "0", "false", "False", "NO", "off"], False)]
)
def test_yes_and_no_in_every_spelling(texts, value):
    for text in texts:
        found = Settings.from_environment({"RINGREDUCE_CUDA_NCCL": text, "RINGREDUCE_REPORT": text})
        assert (found.cuda_nccl, found.report) == (value, value)


def test_least_numbers_of_ranks():
    assert Settings.from_environment({"RINGREDUCE_MIN_NP": "1", "RINGREDUCE_SPARES": "0"}) == Settings()
    for variable, text, least in (("MIN_NP", "0", 1), ("SPARES", "-1", 0), ("SERVERS", "-1", 0)):
        with pytest.raises(
            SettingsError, match=f"RINGREDUCE_{variable}='{text}': .* whole number of ranks of {least} or"
        ):
            Settings.from_environment({f"RINGREDUCE_{variable}": text})


def test_process_sets_have_flags_in_shared_memory_as_far_as_there_is_room():
    assert Settings(fusion_buffer_bytes=8192, fusion_slot_bytes=1024, shared_slot_bytes=256).shared_regions == 4
    assert Settings(fusion_buffer_bytes=1 << 20, fusion_slot_bytes=1024, shared_slot_bytes=256).shared_regions == 32


def test_an_unknown_variable_is_refused_with_the_nearest_known_one():
    message = "RINGREDUCE_FUSION_SLOTBYTES is not a setting of ringreduce; did you mean RINGREDUCE_FUSION_SLOT_BYTES?"
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        Settings.from_environment({"RINGREDUCE_FUSION_SLOTBYTES": "1"})
    with pytest.raises(SettingsError, match="known are: RINGREDUCE_ALGORITHM, "):
        Settings.from_environment({"RINGREDUCE_Q": "1"})


def test_a_buffer_that_holds_too_few_slots_is_refused():
    with pytest.raises(
        SettingsError, match="half of fusion_buffer_bytes=255 must hold at least 2 slots of fusion_slot_bytes=64"
    ):
        Settings(fusion_buffer_bytes=255, fusion_slot_bytes=64)
    with pytest.raises(
        SettingsError, match="half of fusion_buffer_bytes=511 must hold at least 4 slots of shared_slot_bytes=64"
    ):
        Settings(fusion_buffer_bytes=511, fusion_slot_bytes=64, shared_slot_bytes=64)
    with pytest.raises(SettingsError, match="shared_slot_bytes=100: expected a multiple of 64"):
        Settings(shared_slot_bytes=100)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "FUSION_SLOT_BYTES",
            "1",
            "half of fusion_buffer_bytes=16777216 holds more than 65536 slots of fusion_slot",
        ),
        (
            "FUSION_BUFFER_BYTES",
            str(10**18),
            "half of fusion_buffer_bytes=10{18} holds more than 65536 slots of fusion_slot",
        ),
        ("CACHE_CAPACITY", str(10**21), "cache_capacity=10{21}: expected at most 16777216 tensors"),
    ],
)
def test_what_init_could_not_make_room_for_is_refused(variable, text, message):
    with pytest.raises(SettingsError, match=f"^{message}"):
        Settings.from_environment({f"RINGREDUCE_{variable}": text})
    assert Settings(fusion_buffer_bytes=2 * 64 << 16, fusion_slot_bytes=64, cache_capacity=1 << 24)


@pytest.mark.parametrize("device", ["", "0", "12", "0000:3b:00.0", "00000000:3B:00.0"])
def test_a_gpu_is_named_by_index_or_bus_id(device):
    assert Settings.from_environment({"RINGREDUCE_CUDA_DEVICE": device}).cuda_device == device


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"cuda_device": text}, "expected an index, such as 0, or a PCI bus id, such as 0000:3b:00.0")
            for text in ("-1", "cuda:0", "3b:00.0", "0000:3b:00", "GPU-0123", "0 ")
        ),
        ({"placed_gpu": "0"}, "expected a PCI bus id, such as 0000:3b:00.0"),
        ({"cuda_slot_bytes": 1000}, "expected a multiple of 256"),
    ],
    ids=str,
)
def test_a_gpu_setting_that_makes_no_sense_is_refused(changes, message):
    ((name, value),) = changes.items()
    with pytest.raises(SettingsError) as caught:
        Settings(**changes)
    assert str(caught.value) == f"{name}={value!r}: {message}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Checks()),
        ("nan", Checks(nan="report")),
        ("nan:zero, sdc:7", Checks(nan="zero", sdc=7)),
        ("divergence,nan:raise,sdc", Checks("raise", 100, 1000)),
        ("nan:none", "'nan:none'; expected nan, nan:raise, nan:zero, divergence[:N], sdc[:N], with commas between"),
        ("nan,inf", "'inf'; expected nan, "),
        ("divergence:0", "'divergence:0'; expected nan, "),
        ("sdc:-1", "'sdc:-1'; expected nan, "),
        ("nan,nan:raise", "nan is named twice"),
    ],
)
def test_what_is_checked(text, expected):
    if isinstance(expected, Checks):
        assert Checks.parse(text) == Checks.parse(str(expected)) == expected
        environ = {"RINGREDUCE_CHECK": text, "RINGREDUCE_DETERMINISTIC": "1"}
        assert Settings.from_environment(environ).check == text
    else:
        with pytest.raises(SettingsError) as caught:
            Settings.from_environment({"RINGREDUCE_CHECK": text})
        assert str(caught.value).startswith(f"check={text!r}: {expected}")


@pytest.mark.parametrize(
    ("text", "told"),
    [*((text, True) for text in ("1", "true", "True")), *((text, False) for text in ("0", "False", "OFF", "", None))],
)
def test_who_asks_for_autotune_is_told_why_there_is_none(text, told):
    environ = {} if text is None else {"HOROVOD_AUTOTUNE": text}
    assert Settings.from_environment(environ) == Settings()
    notice = "HOROVOD_AUTOTUNE has no effect here (the algorithm is chosen by size; RINGREDUCE_ALGORITHM forces one)"
    assert horovod_notice(environ) == (notice if told else "")


def test_who_sets_variables_that_have_no_effect_is_told_what_does_it():
    names = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_START_TIMEOUT")
    assert horovod_notice(dict.fromkeys(names, "1")) == (
        "HOROVOD_STALL_CHECK_DISABLE has no effect here (RINGREDUCE_STALL_CHECK_S=0 does it); HOROVOD_CONTROLLER, "
        "HOROVOD_CPU_OPERATIONS have no effect here (ranks talk over MPI alone, with the threads that ringreduce "
        "needs); HOROVOD_START_TIMEOUT has no effect here (ringrun --start-timeout does it)"
    )
