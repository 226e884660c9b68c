"""Which variables leave this host."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.errors import UsageError
from ringrun.forward import (
    forwarded,
    is_secret,
    leave_batch_system,
    leave_outer_job,
    parse_allowed,
    parse_env,
    withheld,
)
from tests.support.loops import in_a_loop

SECRETS = """
WANDB_API_KEY HF_TOKEN hf_token DB_SECRET AWS_ACCESS_KEY_ID AWS_PROFILE PGPASSWORD SMTP_PASSWD MYSQL_PWD DB_PASS
SSHPASS GITHUB_PAT SENTRY_DSN OPENAI_APIKEY DATABASE_URL MY_SECRET_VALUE SECRET_KEY_BASE PASSPHRASE SESSION_JWT
STORAGE_CONNECTION_STRING SLACK_WEBHOOK_URL DOCKER_AUTH DOCKER_AUTH_CONFIG CI_JOB_JWT_V2 OTEL_EXPORTER_OTLP_HEADERS
HF_TOKEN_2 ENCRYPTION_KEY_V1 PASS PAT AUTHORIZATION AUTH_HEADER TOKEN JWT DEPLOY_KEYS
SIGNING_KEY MY_API_KEY_2 S3_ACCESS_KEY_ID TLS_PRIVATE_KEY_PEM CREDENTIALS_FILE DB_CREDS API_BEARER ID_COOKIE HASH_SALT
"""
LEAVES = """
PATH MANPATH MLFLOW_URL LANG PYTHONPATH RINGREDUCE_COSTS OMPI_MCA_btl KEYBOARD TOKENIZERS_PARALLELISM MAX_TOKENS
KEY_FRAMES AUTHOR COMPASS PATTERN TOKEN_COUNT MAX_TOKEN_LENGTH HOROVOD_CYCLE_TIME OMPI_MCA_plm TORCH_HOME
TORCH_NCCL_ASYNC_ERROR_HANDLING TORCHINDUCTOR_CACHE_DIR
"""
STAYS = """
HOME HOSTNAME SSH_AUTH_SOCK XDG_RUNTIME_DIR TMPDIR SLURM_PROCID PMI_RANK RINGRUN_AUTHKEY OMPI_COMM_WORLD_RANK
PMIX_RANK PRTE_MCA_x KUBERNETES_SERVICE_HOST JOB_COMPLETION_INDEX SKYPILOT_NODE_RANK SM_CURRENT_HOST SM_RESOURCE_CONFIG
"""


@in_a_loop("name", SECRETS.split())
def test_secrets_stay_unless_they_are_asked_for(name):
    assert is_secret(name)
    here = {name: "hush", "LANG": "C"}
    assert forwarded(here, {}, gpus_are_chosen=False) == {"LANG": "C"}
    assert withheld(here, {}) == [name]
    assert forwarded(here, {name: "hush"}, gpus_are_chosen=False) == here
    assert withheld(here, {name: "hush"}) == []


@in_a_loop("name", LEAVES.split())
def test_what_a_script_may_read_leaves(name):
    assert forwarded({name: "x"}, {}, gpus_are_chosen=True) == {name: "x"}


@in_a_loop(
    "value",
    [
        "https://me:hush@host/x",
        "redis://:hush@host",
        "a b postgres://u:p@[::1]:5432/d",
        "https://hush@host/x.git",
        "Server=h;User=me;Password=hush;",
        "AccountName=me;AccountKey=hush",
        "SharedAccessKeyName=me;SharedAccessKey=hush",
        "-----BEGIN RSA PRIVATE KEY-----\nhush",
        "Authorization=Bearer hush",
        "ghp_hush",
        "AKIAIOSFODNN7EXAMPLE",
        "https://host/blob?a=1&sig=hush",
    ],
)
def test_what_is_a_secret_is_one_under_any_name(value):
    assert withheld({"BROKER_URL": value, "PROXY": value}, {}) == ["BROKER_URL", "PROXY"]
    assert forwarded({"BROKER_URL": value}, {}, gpus_are_chosen=False) == {}


@in_a_loop(
    "value",
    ["https://host:80/a@b", "git@github.com:a/b", "ssh://me@host", "//a:b", "http://h/u:p@x", "https://h/?design=1"],
)
def test_a_url_without_one_is_not(value):
    assert forwarded({"BROKER_URL": value}, {}, gpus_are_chosen=False) == {"BROKER_URL": value}


def test_an_allow_list_lets_nothing_else_leave_but_what_jobs_need():
    here = {
        "CUDA_HOME": "/c",
        "PROJECT": "apollo",
        "PATH": "/bin",
        "OMPI_MCA_btl": "x",
        "HOME": "/me",
        "CUDA_TOKEN": "hush",
    }
    allowed = parse_allowed("CUDA_*, LANG", "--env-allow")
    assert withheld(here, {}, allowed) == ["CUDA_TOKEN", "PROJECT"]
    assert withheld(here, {"PROJECT": "apollo"}, allowed) == ["CUDA_TOKEN"]
    assert withheld(here, {}, parse_allowed(None, "--env-allow")) == ["CUDA_TOKEN"]
    with pytest.raises(UsageError, match="--env-allow A=b: expected names of variables and patterns with commas"):
        parse_allowed("A=b", "--env-allow")


def test_folders_are_no_passwords():
    assert withheld({"PWD": "/home", "OLDPWD": "/"}, {}) == []


@in_a_loop("name", STAYS.split())
def test_what_describes_this_host_or_process_stays(name):
    assert forwarded({name: "x"}, {}, gpus_are_chosen=False) == {}


def test_a_node_that_joins_leaves_its_batch_system_and_stays_in_its_pod():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "LANG": "C"}
    environ = {**pod, "SLURM_JOB_ID": "7", "PMI_RANK": "1", "RINGRUN_AUTHKEY": "hush", "NODE_RANK": "2"}
    leave_batch_system(environ, ["NODE_*"])
    assert environ == pod


@pytest.mark.parametrize("in_slurm", [False, True])
def test_gpus_are_chosen_by_the_user_or_by_the_batch_system(in_slurm):
    here = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert forwarded(here, {}, gpus_are_chosen=in_slurm) == ({} if in_slurm else here)


def test_env_takes_names_and_values():
    assert parse_env(["A", "B=c=d", "E="], {"A": "1", "B": "2"}) == {"A": "1", "B": "c=d", "E": ""}
    function = {"BASH_FUNC_module%%": "() {  eval x;\n}"}
    assert parse_env(["BASH_FUNC_module%%", "A.B=1"], function) == {**function, "A.B": "1"}, "what a shell exports"
    with pytest.raises(UsageError, match="--env '': expected NAME or NAME=VALUE"):
        parse_env(["=1"], {})
    with pytest.raises(UsageError, match="--env C: there is no such variable here; set it, or give --env C=VALUE"):
        parse_env(["C"], {})
    for name in ("RINGRUN_SETTINGS", "RINGREDUCE_MIN_NP"):
        with pytest.raises(UsageError, match=f"^--env {name}: ringrun sets this variable itself$"):
            parse_env([f"{name}=1"], {})


def test_a_ringrun_in_a_rank_keeps_nothing_of_that_one_s_job_and_says_nothing_of_it():
    own = {"RINGREDUCE_MIN_NP": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "20000", "RINGREDUCE_CHECK": "nan"}
    in_rank = own | {"RINGREDUCE_ERROR_FILE": "rank0.json"}
    assert (leave_outer_job(in_rank), in_rank) == ([], {"RINGREDUCE_CHECK": "nan"})
    assert leave_outer_job(own) == ["RINGREDUCE_MIN_NP"], "no ringrun has set this one"
    assert own == {"MASTER_ADDR": "h1", "MASTER_PORT": "20000", "RINGREDUCE_CHECK": "nan"}, "of the user's own job"


@given(st.text())
def test_any_text_is_variables_or_one_usage_error(text):
    with contextlib.suppress(UsageError):
        for name in parse_env([text], {"A": "b"}):
            assert name
            assert not {*name} & {*"=\0"}
