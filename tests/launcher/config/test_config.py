"""Settings as flags and as lines of a file: which counts, where each came from, and what is refused."""

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.settings import HOROVOD, LEAST_FUSION_BYTES, PREFIX, Settings
from ringrun import build, cli
from ringrun.arguments import LIST
from ringrun.config import horovod
from ringrun.config import resolve as config
from ringrun.errors import UsageError
from ringrun.machine.topology import Gpu, Topology
from tests.support.loops import in_a_loop
from tests.support.tiers import parted

needs_yaml = pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="no PyYAML")

FIELDS = [field for field in dataclasses.fields(Settings) if field.name in config.public_settings()]
OTHER = {
    "servers": "1",
    "algorithm": "ring",
    "check": "nan,divergence:7",
    "costs": "wire_us=5",
    "fusion_buffer_bytes": str(64 << 20),
    "shared_slot_bytes": str(2 << 20),
    "fusion_slot_bytes": str(1 << 20),
    "ring_segment_bytes": "4096",
    "cache_capacity": "7",
    "cuda_device": "1",
    "cuda_slot_bytes": "4096",
    "cycle_time_ms": "3.5",
    "stall_check_s": "99",
    "stall_abort_s": "100",
    "timeline": "a: b.json",
    "log_level": "debug",
    "torch_backend": "ring",
}
"""Values that are no defaults; the settings that are on or off are turned over."""


def other(field):
    return OTHER.get(field.name) or str(int(not field.default))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """The variables of whoever runs the tests do not count."""
    for name in [*(PREFIX + field.name.upper() for field in FIELDS), *HOROVOD]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write job.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "job.yaml").write_text(text)
        return "job.yaml"

    return write


def parsed(*arguments):
    return cli.parse([*arguments, "-np", "2", "true"]).config


def refusal(*arguments):
    with pytest.raises(UsageError) as caught:
        parsed(*arguments)
    return str(caught.value)


def of_file(file, text):
    return parsed("--config-file", file(text))


@in_a_loop("field", FIELDS)
def test_every_setting_has_its_flag(field):
    name = field.name.replace("_", "-")
    flag = f"--no-{name}" if field.default is True else f"--{name}"
    given = [flag] if isinstance(field.default, bool) else [flag, OTHER[field.name]]
    variables = parsed(*given).variables
    assert variables == {PREFIX + field.name.upper(): other(field)}
    assert getattr(Settings.from_environment(variables), field.name) != field.default


@in_a_loop("dash", "-_")
@in_a_loop("field", FIELDS)
@needs_yaml
def test_every_setting_has_its_key(field, dash, file):
    value = OTHER.get(field.name) or str(not field.default).lower()
    quoted = f"'{value}'" if isinstance(field.default, str) else value
    resolved = of_file(file, f"# first line\n{field.name.replace('_', dash)}: {quoted}\n")
    assert resolved.variables == {PREFIX + field.name.upper(): other(field)}
    assert resolved.settings[field.name].source == "job.yaml:2"


def test_what_ringrun_sets_itself_is_no_flag():
    assert refusal("--error-file=x") == "there is no flag --error-file; see ringrun --help"


@needs_yaml
def test_a_flag_counts_more_than_the_file_the_file_more_than_a_variable(file, monkeypatch):
    def value():
        found = parsed(*arguments).settings["cycle_time_ms"]
        return found.text, found.source

    arguments = ["--show-config"]
    assert value() == ("50.0", "default")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    assert value() == ("1", "HOROVOD_CYCLE_TIME")
    monkeypatch.setenv("RINGREDUCE_CYCLE_TIME_MS", "2")
    assert value() == ("2", "RINGREDUCE_CYCLE_TIME_MS")
    assert parsed(*arguments).variables == {}
    arguments += ["--config-file", file("cycle_time_ms: 3")]
    assert value() == ("3", "job.yaml:1")
    arguments.append("--cycle-time-ms=4")
    assert value() == ("4", "--cycle-time-ms")
    assert parsed(*arguments).variables == {"RINGREDUCE_CYCLE_TIME_MS": "4"}


@needs_yaml
def test_own_flags_may_stand_in_the_file(file):
    path = file("np: 3\nverbose: true\nmpi_args: --report-bindings --map-by 'slot'\n")
    options = cli.parse(["--config-file", path, "true"])
    assert (options.np, options.job.verbose) == (3, True)
    assert options.job.mpi_args == ["--report-bindings", "--map-by", "slot"]
    assert cli.parse(["--config-file", path, "-np", "2", "true"]).np == 2


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("env: FOO=bar", {"FOO": "bar"}),
        ("env: [FOO=bar, HERE, N=2]", {"FOO": "bar", "HERE": "x y", "N": "2"}),
        ("env:\n- HERE\n", {"HERE": "x y"}),
        ("env: []", {}),
    ],
)
@needs_yaml
def test_a_flag_that_may_be_repeated_takes_one_value_or_a_list_in_the_file(text, asked, file, monkeypatch):
    monkeypatch.setenv("HERE", "x y")
    assert cli.parse(["--config-file", file(text), "true"]).job.asked == asked
    assert cli.parse(["--config-file", file(text), "--env", "BAR=1", "true"]).job.asked == {"BAR": "1"}


@needs_yaml
def test_hosts_may_be_a_list_in_the_file(file):
    for text in ("hosts: [h1:2, h2]", "hosts:\n- h1:2\n- h2\n", "hosts: h1:2,h2"):
        assert [*map(str, cli.parse(["--config-file", file(text), "true"]).found.hosts)] == ["h1:2", "h2"]


@needs_yaml
def test_every_flag_with_commas_between_its_values_takes_a_list_of_yaml_s(file):
    listed = {action.dest for action in cli._parser().flags if action.metavar == LIST}
    assert listed == {"hosts", "network_interfaces", "exclude", "ranks", "forward_signals", "env_allow"}
    for name in listed:
        arguments = ["--config-file", file(f"{name}: [a, 'b,c']"), "true"]
        assert getattr(config.resolve(cli._parser(), arguments, {}).options, name) == "a,b,c"
    found = parsed("--config-file", file("check: [nan, divergence]")).variables
    assert found == {"RINGREDUCE_CHECK": "nan,divergence"}


def test_without_settings_ringreduce_is_not_asked():
    assert parsed().settings == {}
    assert parsed("--verbose", "--mpi-args=-v").settings == {}


def test_horovods_flags_mean_settings():
    given = ["--fusion-threshold-mb", "32", "--cycle-time-ms", "5", "--cache-capacity", "0"]
    given += ["--timeline-filename", "t.json", "--timeline-mark-cycles"]
    given += ["--stall-check-warning-time-seconds", "20", "--stall-check-shutdown-time-seconds", "40"]
    settings = Settings.from_environment(parsed(*given).variables)
    assert settings.fusion_buffer_bytes == 32 << 20
    assert (settings.cycle_time_ms, settings.cache_capacity) == (5.0, 0)
    assert (settings.timeline, settings.timeline_mark_cycles) == ("t.json", True)
    assert (settings.stall_check_s, settings.stall_abort_s) == (20.0, 40.0)


def test_horovod_s_threshold_of_0_is_the_least_that_there_can_be():
    """There it turns fusion off."""
    assert parsed("--fusion-threshold-mb=0").variables == {"RINGREDUCE_FUSION_BUFFER_BYTES": str(LEAST_FUSION_BYTES)}


@in_a_loop(
    ("given", "stall_check_s"),
    [
        (["--no-stall-check"], "0.0"),
        (["--no-stall-check", "--stall-check-warning-time-seconds", "9"], "0.0"),
        (["--stall-check"], "10.0"),
        (["--stall-check", "--stall-check-warning-time-seconds", "9"], "9"),
    ],
)
def test_the_stall_check_goes_on_and_off(given, stall_check_s):
    assert parsed(*given).variables["RINGREDUCE_STALL_CHECK_S"] == stall_check_s


@in_a_loop(("flag", "text"), [("with", "1"), ("without", "0"), ("hide", "0"), ("no-hide", "1")])
def test_horovods_switches_of_the_log(flag, text):
    name = f"--{'no-' * flag.startswith('no-')}log-{flag.removeprefix('no-')}-timestamp"
    assert parsed(name).variables == {"RINGREDUCE_LOG_TIMESTAMP": text}


IGNORED = horovod.IGNORED_VALUES | horovod.IGNORED_SWITCHES


@in_a_loop("flag", IGNORED)
def test_a_flag_without_meaning_says_so(flag):
    resolved = parsed(f"--{flag}", *["3"] * (flag in horovod.IGNORED_VALUES))
    assert resolved.variables == {}
    assert resolved.notices == [f"--{flag} has no effect here ({IGNORED[flag]})"]


HOROVODRUN = """
-v --version -np=2 --num-proc=2 -cb --check-build --disable-cache --start-timeout=9 --network-interfaces=lo
--network-interface=lo --output-filename=x --verbose -p=22 --ssh-port=22 -i=FILE --ssh-identity-file=FILE
--fusion-threshold-mb=64 --cycle-time-ms=5 --cache-capacity=9 --hierarchical-allreduce --no-hierarchical-allreduce
--hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
--autotune-log-file=x --autotune-warmup-samples=3 --autotune-steps-per-sample=3 --autotune-bayes-opt-max-samples=3
--autotune-gaussian-process-noise=.5 --min-np=1 --min-num-proc=1 --slots-per-host=2 --elastic-timeout=9 --reset-limit=9
--timeline-filename=x --timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check
--stall-check-warning-time-seconds=9 --stall-check-shutdown-time-seconds=9 --mpi-threads-disable
--no-mpi-threads-disable --mpi-args=-v --tcp --binding-args=x --num-nccl-streams=2 --thread-affinity=1
--gloo-timeout-seconds=9 --log-level=INFO --log-with-timestamp --log-without-timestamp -prefix-timestamp
--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H=localhost:2 --hosts=localhost:2
-hostfile=FILE --hostfile=FILE --gloo --mpi --jsrun
"""
"""All flags of Horovod 0.28.1's launcher (runner/launch.py) but those below, each with a value of its own."""
NEED_MORE = {"--config-file", "--max-np", "--max-num-proc", "--host-discovery-script", "--blacklist-cooldown-range"}
"""Of a file, or of an elastic job: other tests have them."""


def test_the_list_of_horovodruns_flags_is_complete():
    assert {word.partition("=")[0] for word in HOROVODRUN.split()} | NEED_MORE == horovod.flags()


@in_a_loop("flag", HOROVODRUN.split())
def test_every_flag_of_horovodrun_is_taken(flag, file):
    hosts = file("localhost slots=2")
    words = flag.replace("FILE", hosts).split("=", 0 if flag.startswith("--") else 1)
    assert cli.parse([*words, "train"]).job.command == ["train"]


def test_horovods_other_names_mean_the_same(file):
    request = cli.parse(["--num-proc", "3", "-hostfile", file("h1\nh2 slots=4"), "--slots-per-host", "2", "true"])
    assert request.np == 3
    assert list(map(str, request.found.hosts)) == ["h1:2", "h2:4"]
    several = ["--network-interface", "lo", "--network-interface", "lo,lo"]
    assert parsed(*several).options.network_interfaces == "lo,lo,lo"
    assert cli.parse(["-prefix-timestamp", "true"]).job.timestamps


def test_hosts_of_the_command_line_count_more_than_those_of_the_file_by_either_flag(file, tmp_path):
    hosts = str(tmp_path / "hosts")
    Path(hosts).write_text("h1 slots=2")
    by_list = cli.parse(["--config-file", file(f"hostfile: {hosts}"), "-H", "h2:3", "true"])
    by_file = cli.parse(["--config-file", file("hosts: h2:3"), "--hostfile", hosts, "true"])
    assert [[*map(str, each.found.hosts)] for each in (by_list, by_file)] == [["h2:3"], ["h1:2"]]


def test_all_of_autotune_is_told_in_one_line():
    resolved = parsed("--autotune", "--autotune-log-file", "found", "--autotune-warmup-samples=3")
    assert resolved.variables == {}
    assert resolved.notices == [f"--autotune has no effect here ({horovod.TUNING})"]
    assert "nothing needs tuning" in horovod.TUNING


HOROVODS_FILE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  cache_capacity: 2048
  hierarchical_allreduce: true
  torus_allreduce: true
autotune:
  enabled: true
  log_file: 'log.txt'
  warmup_samples: 5
timeline:
  filename: 'timeline.json'
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
library_options:
  num_nccl_streams: 2
logging:
  level: INFO
  hide_timestamp: false
"""


@needs_yaml
def test_horovods_file_is_understood(file):
    resolved = of_file(file, HOROVODS_FILE)
    assert resolved.variables == {
        "RINGREDUCE_FUSION_BUFFER_BYTES": str(32 << 20),
        "RINGREDUCE_CYCLE_TIME_MS": "10",
        "RINGREDUCE_CACHE_CAPACITY": "2048",
        "RINGREDUCE_TIMELINE": "timeline.json",
        "RINGREDUCE_TIMELINE_MARK_CYCLES": "1",
        "RINGREDUCE_STALL_CHECK_S": "0.0",
        "RINGREDUCE_LOG_LEVEL": "INFO",
        "RINGREDUCE_LOG_TIMESTAMP": "1",
    }
    assert [notice.partition(" has no effect here")[0] for notice in resolved.notices] == [
        "job.yaml:10: autotune",
        "job.yaml:7: hierarchical_allreduce",
        "job.yaml:8: torus_allreduce",
        "job.yaml:2: controller",
        "job.yaml:20: num_nccl_streams",
    ]


@in_a_loop(
    ("given", "message"),
    [
        (
            ["--cache-capacity", "x"],
            "--cache-capacity: RINGREDUCE_CACHE_CAPACITY='x': expected a whole number of tensors of 0 or more, "
            "such as 16384",
        ),
        (
            ["--check", "nan,inf"],
            "--check: check='nan,inf': 'inf'; expected nan, nan:raise, nan:zero, divergence[:N], sdc[:N], with commas",
        ),
        (
            ["--algorithm", "rong"],
            "--algorithm: RINGREDUCE_ALGORITHM='rong': expected auto or one of shared, hierarchical, ring, halving, "
            "direct, doubling, nccl",
        ),
        (
            ["--cuda-device", "x"],
            "--cuda-device: cuda_device='x': expected an index, such as 0, or a PCI bus id, such as 0000:3b:00.0",
        ),
        (
            ["--log-level", "loud"],
            "--log-level: RINGREDUCE_LOG_LEVEL='loud': expected one of trace, debug, info, warning, error, fatal",
        ),
        (["--torch-backend", "nccl"], "--torch-backend: torch_backend='nccl': expected ring, or nothing"),
        (["--costs", "x=1"], "--costs: RINGREDUCE_COSTS: 'x=1'; expected name=number"),
        (
            ["--fusion-threshold-mb=8", "--fusion-slot-bytes=4194304"],
            "--fusion-threshold-mb: --fusion-slot-bytes: half of fusion_buffer_bytes=8388608 must hold at least 2",
        ),
        (
            ["--fusion-threshold-mb=x"],
            "--fusion-threshold-mb: expected a whole number of MB (2^20 bytes) from 0 to 1048576",
        ),
        (["--fusion-threshold-mb", "9" * 5000], "--fusion-threshold-mb: expected a whole number of MB"),
        (
            ["--timeline=a", "--timeline-filename=b"],
            "--timeline-filename and --timeline both set timeline; give one of them",
        ),
        (["--deterministic", "1"], "--deterministic 1: it takes no value; write --deterministic or --no-deterministic"),
        (["--no-cuda-ipc", "True"], "--no-cuda-ipc True: it takes no value; write --cuda-ipc or --no-cuda-ipc"),
        (["--cuda-ipc=1"], "--cuda-ipc or --no-cuda-ipc: it takes no value, got '1'"),
        (["--cache-capacity"], "argument --cache-capacity: expected one argument"),
        (["--mpi-args=--map-by 'slot"], '--mpi-args "--map-by \'slot": no closing quotation; close it, or write \\'),
    ],
)
def test_a_wrong_value_is_one_clear_line(given, message):
    with pytest.raises(UsageError) as caught:
        cli.parse(given if given == ["--cache-capacity"] else [*given, "-np", "2", "true"])
    assert str(caught.value).startswith(message)


def test_a_wrong_variable_beside_a_flag_is_told_too(monkeypatch):
    monkeypatch.setenv("RINGREDUCE_STALL_ABORT_S", "soon")
    said = refusal("--cache-capacity", "5")
    assert said == "RINGREDUCE_STALL_ABORT_S='soon': expected a number of seconds of 0 or more, such as 0.0"


@in_a_loop(
    ("text", "message"),
    [
        ("a\n---\nb", "job.yaml:2: not YAML: but found another document"),
        ("np: 2\nx: [1", "job.yaml:2: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("x: '\\U00110000", "job.yaml:1: not YAML: "),
        ('x: "\\UFFFFFFFF"', "job.yaml: not YAML: "),
        ("[" * 5000, "job.yaml: nested too deeply; expected groups of values at most"),
        ("- np: 2", "job.yaml:1: expected lines of `key: value`, as in: cycle_time_ms: 5"),
        ("\ncycle_time: 5", "job.yaml:2: unknown key 'cycle_time'; did you mean cycle_time_ms?"),
        (
            "params:\n  fusion_treshold_mb: 5",
            "job.yaml:2: unknown key 'params: fusion_treshold_mb'; did you mean fusion_threshold_mb?",
        ),
        ("zzz: 5", "job.yaml:1: unknown key 'zzz'; keys are flags without the dashes before them; see ringrun -h"),
        ("config_file: x.yaml", "job.yaml:1: unknown key 'config_file'; "),
        ("command: x", "job.yaml:1: unknown key 'command'; "),
        ("prams:\n  cycle_time_ms: 1", "job.yaml:1: prams: expected one value, but it is a map; groups are params, "),
        *(
            (f"env: {each}", "job.yaml:1: env: expected one value, but it is a map; write env: [SEED=1, HF_TOKEN]")
            for each in ("{SEED: 1}", "[SEED: 1]", "\n  SEED: 1")
        ),
        ("hosts: [h1: 4]", "job.yaml:1: hosts: expected one value, but it is a map; write hosts: [h1:4, h2:4]"),
        *(
            (f"np: {each}", "job.yaml:1: np: expected one value, but it is a list")
            for each in ("[2]", "[]", "!!str []")
        ),
        ("hosts: []", "job.yaml:1: hosts: expected one value, but it is a list"),
        ("elastic: [true]", "job.yaml:1: elastic: expected one value, but it is a list"),
        ("env: [[A]]", "job.yaml:1: env: expected one value, but it is a list"),
        ("env: [A=1, ~]", "job.yaml:1: env has no value; give one, or remove the line"),
        ("np:\n", "job.yaml:1: np has no value; give one, or remove the line"),
        ('wdir: ""', "job.yaml:1: wdir: expected a value, but it is empty; remove the line"),
        ("[a]: 2\n", "job.yaml:1: a key must be a name, as in: cycle_time_ms: 5"),
        ('"a\\nb": 2', "job.yaml:1: a key must be a name, as in: cycle_time_ms: 5"),
        ("np: 1\nnp: 2", "job.yaml:2: np is given twice; the first is at job.yaml:1"),
        ("np: 1\n'np': 2", "job.yaml:2: np is given twice; the first is at job.yaml:1"),
        (
            "cycle_time_ms: 1\nparams:\n  cycle-time-ms: 2",
            "job.yaml:3: params: cycle-time-ms is given twice; the first is at job.yaml:1",
        ),
        ("cuda_ipc: true\nno_cuda_ipc: true", "job.yaml:2: no_cuda_ipc is given twice; the first is at job.yaml:1"),
        ("timeline: a\ntimeline_filename: b", "job.yaml:2 and job.yaml:1 both set timeline; give one of them"),
        ("np: zero", "job.yaml:1: -np: expected auto or a whole number from 1 to 999999, got 'zero'"),
        (
            "output_filename: a\nreport: No",
            "job.yaml:2: report: expected a value, got No; remove the line, or quote it",
        ),
        ("np: true", "job.yaml:1: np: expected a value, got true; "),
        ("env: off", "job.yaml:1: env: expected a value, got off; "),
        ("timeline: false", "job.yaml:1: timeline: expected a value, got false; "),
        ("verbose: 1", "job.yaml:1: verbose: expected true or false, got '1'"),
        ("cache_capacity: 'yes'", "job.yaml:1: RINGREDUCE_CACHE_CAPACITY='yes': expected a whole number of tensors"),
        ("cache_capacity: 1.5", "job.yaml:1: RINGREDUCE_CACHE_CAPACITY='1.5': expected a whole number of tensors"),
        ("algorithm: 'no'", "job.yaml:1: RINGREDUCE_ALGORITHM='no': expected auto or one of"),
        (
            "fusion_threshold_mb: x",
            "job.yaml:1: fusion_threshold_mb: expected a whole number of MB (2^20 bytes) from 0",
        ),
        ('timeline: "a\\0b"', "job.yaml:1: timeline: 'a\\x00b' holds a character that a variable cannot hold"),
        ('mpi_args: "\'"', 'job.yaml:1: --mpi-args "\'": no closing quotation'),
    ],
)
@needs_yaml
def test_a_wrong_file_is_one_clear_line(text, message, file):
    with pytest.raises(UsageError) as caught:
        cli.parse(["--config-file", file(text), "true"])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "variable", "value"),
    [
        ("deterministic: true", "RINGREDUCE_DETERMINISTIC", "1"),
        ("deterministic: false", "RINGREDUCE_DETERMINISTIC", "0"),
        ("no_deterministic: true", "RINGREDUCE_DETERMINISTIC", "0"),
        ("no-deterministic: off", "RINGREDUCE_DETERMINISTIC", "1"),
        ("no_stall_check: on", "RINGREDUCE_STALL_CHECK_S", "0.0"),
        ("stall_check: false", "RINGREDUCE_STALL_CHECK_S", "0.0"),
        ("stall_check: {enabled: yes}", "RINGREDUCE_STALL_CHECK_S", "10.0"),
        ("stall_check: {shutdown_time_seconds: 7}", "RINGREDUCE_STALL_ABORT_S", "7"),
    ],
)
@needs_yaml
def test_switches_in_a_file(text, variable, value, file):
    assert of_file(file, text).variables == {variable: value}


@pytest.mark.parametrize("text", ["", "# nothing\n", "params:\n", "timeline:\nstall_check:\n"])
@needs_yaml
def test_a_file_may_say_nothing(text, file):
    assert of_file(file, text).variables == {}


def test_a_file_that_cannot_be_read(tmp_path):
    assert refusal("--config-file", str(tmp_path)) == f"--config-file {tmp_path}: Is a directory"
    assert refusal("--config-file", "nowhere.yaml") == "--config-file nowhere.yaml: No such file or directory"
    (tmp_path / "latin").write_bytes(b"timeline: \xe9")
    assert "latin: not text in UTF-8" in refusal("--config-file", str(tmp_path / "latin"))


def test_without_pyyaml_the_cure_is_told(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert (
        refusal("--config-file", file("np: 2"))
        == "--config-file job.yaml: reading YAML needs PyYAML; pip install pyyaml"
    )


KEYS = st.sampled_from(["np", "timeline", "params", "stall_check", "enabled", "cache_capacity", "autotune", "<<", "?"])
VALUES = st.sampled_from(["1", "true", "{}", "[", "&a", "*a", "'x", "!!int", "|", "", "0x1", "1:2", "~", "2001-01-01"])
LINES = st.builds("{}{}: {}".format, st.sampled_from(["", "  ", "- "]), KEYS, VALUES | st.text(max_size=4))


@given(st.text() | st.lists(LINES, max_size=6).map("\n".join))
@needs_yaml
def test_any_file_is_a_configuration_or_one_error(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        resolved = parsed("--config-file", str(path))
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either is right
        return
    assert Settings.from_environment(resolved.variables)


@given(
    st.lists(st.sampled_from(["--algorithm", "--autotune", "-np", "2", "--timeline= x", "--", "x", "-h="]) | st.text())
)
def test_any_command_line_is_a_configuration_or_one_error(arguments):
    try:
        cli.parse(["--verbose", *("-x" if each in ("-h", "--help") else each for each in arguments)])
    except UsageError:
        return


def test_show_config_prints_and_does_not_run(ringrun):
    done = ringrun("--show-config", "--deterministic", "touch", "made", env={"RINGREDUCE_TIMELINE": "a\nb"})
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert set(rows) >= {field.name for field in FIELDS} | {"np", "mpi_args"}
    assert rows["deterministic"] == ["1", "--deterministic"]
    assert rows["timeline"] == ["'a\\nb'", "RINGREDUCE_TIMELINE"]
    assert rows["cache_capacity"] == ["16384", "default"]
    assert rows["np"] == ["auto", "default"]
    assert len({line.index(line.split()[-1]) for line in done.stdout.splitlines()}) == 1  # aligned


def test_check_build_prints_a_table(ringrun):
    done = ringrun("--check-build")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ringreduce v")
    lines = done.stdout.splitlines()
    assert "Available Frameworks:" in lines
    assert "    [X] NumPy" in lines
    assert {line[8:] for line in lines} > {"Keras", "TensorFlow", "Optuna (sweeps)", "PyYAML (--config-file)"}
    assert not {"    [ ] Gloo", "    [ ] CCL", "    [ ] DDL"} & set(lines), "boxes that nobody can tick"
    assert "Available for GPU Arrays:" in lines
    assert sum(line.startswith(("    [X] Open MPI (/", "    [X] MPICH (/")) for line in lines) == 1


def test_check_build_tells_what_there_is_for_gpu_arrays(tmp_path, monkeypatch):
    def rows(gpus, driver, cupy):
        monkeypatch.setattr(build, "read_topology", lambda _: Topology((), (Gpu("0"),) * gpus))
        monkeypatch.setattr(build, "driver_version", lambda: driver)
        monkeypatch.setattr(build, "installed_cupy", lambda: cupy)
        return build.for_gpu_arrays()

    assert rows(8, "580.65.06", "cupy-cuda13x 14.2.0") == [
        ("8 NVIDIA GPUs", True),
        ("NVIDIA driver 580.65.06", True),
        ("cupy-cuda13x 14.2.0", True),
    ]
    assert rows(0, "", "") == [
        ("NVIDIA GPU", False),
        ("NVIDIA driver", False),
        ("CuPy (pip install 'cupy-cuda12x[ctk]', or 'cupy-cuda13x[ctk]')", False),
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("something else", ""),
        (None, ""),
    ],
)
def test_the_driver_s_version(text, version, tmp_path):
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert build.driver_version(tmp_path / "version") == version


def test_check_build_without_mpi4py(ringrun, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\")")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = ringrun("--check-build", env={"PYTHONPATH": path})
    assert "    [ ] Open MPI\n    [ ] MPICH\n" in done.stdout
    assert "has no mpi4py" in done.stdout


SHOW = """
    import ringreduce as rr
    rr.init()
    settings = rr.info().settings
    print(settings["algorithm"], settings["cache_capacity"], settings["stall_check_s"])
"""


def test_flags_reach_all_ranks(ringrun, script):
    given = ["--algorithm", "ring", "--cache-capacity", 9, "--no-stall-check", "--mpi"]
    done = ringrun("-np", 2, *given, *script(SHOW), env={"RINGREDUCE_CACHE_CAPACITY": "5"})
    assert (done.returncode, done.stderr) == (0, "ringrun: --mpi has no effect here (MPI is always used)\n")
    assert sorted(done.stdout.splitlines()) == ["[0] ring 9 0.0", "[1] ring 9 0.0"]


MPI_ARGS = ["--map-by slot:OVERSUBSCRIBE", "--bind-to none", "--map-by :OVERSUBSCRIBE"]


@pytest.mark.parametrize("mpi_args", parted(MPI_ARGS, lambda args: args == "--bind-to none"))
def test_mpi_args_reach_mpirun(mpi_args, ringrun, python):
    if "[X] Open MPI" not in ringrun("--check-build").stdout:
        pytest.skip("arguments of Open MPI's")
    done = ringrun("-np", 2, f"--mpi-args={mpi_args}", python, "-c", "print('ran')")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] ran", "[1] ran"])
