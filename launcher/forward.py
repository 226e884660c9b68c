"""Which variables of ringrun's environment the ranks on other hosts get. Pure functions.

All but three kinds: secrets, which stay on this host unless --env asks for them, with --env-allow all that it does not
name; what describes this host or this login; and what a batch system or an MPI has set for this one process. They
travel over the agents' connections and stand on no command line.
"""

import fnmatch
import re
from collections.abc import Mapping, MutableMapping, Sequence

from .errors import UsageError

_ERROR_FILE = "RINGREDUCE_ERROR_FILE"
SET_BY_RINGRUN = (
    *(_ERROR_FILE, "RINGREDUCE_PLACED_GPU", "RINGREDUCE_RESTART_COUNT", "RINGREDUCE_STATE_DIR"),
    *("RINGREDUCE_ELASTIC", "RINGREDUCE_MIN_NP", "RINGREDUCE_SPARES", "RINGREDUCE_TWICE"),
)
"""Settings of ringreduce that are nobody's wish: ringrun sets them itself, for each rank."""

_OF_OUTER_JOB = ("MASTER_ADDR", "MASTER_PORT")
"""Where the ranks of the job meet in whose rank a ringrun may run."""

SECRET_PATTERNS = (
    "*_TOKEN", "TOKEN", "*_KEY", "*_KEYS", "*APIKEY*", "*API_KEY*", "*ACCESS_KEY*", "*PRIVATE_KEY*", "*SECRET*",
    "*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*_PWD", "*_PASS", "SSHPASS", "*CREDENTIAL*", "*_CREDS", "*_PAT",
    "*_AUTH", "*_JWT", "JWT", "*BEARER*", "*_COOKIE", "*_SALT", "*_DSN", "*DATABASE_URL", "*CONNECTION_STRING*",
    "*WEBHOOK*", "AWS_*", "*_AUTH_*", "AUTH_*", "AUTHORIZATION", "*_JWT_*", "*_TOKEN_[0-9]*", "*_KEY_V[0-9]*", "PASS",
    "PAT", "*_HEADERS",
)  # fmt: skip
"""Names, in capitals or not, of variables that stay unless --env asks for them."""

_CREDENTIALS = re.compile(  # https://user:password@host, https://token@host, connection strings, keys
    r"//[^/@\s]*:[^/@\s]+@|https?://[^/@\s]+@|(?i:password|accountkey|sharedaccesskey)=\S|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\bBearer\s|\bgh[pousr]_\w|\bAKIA[0-9A-Z]{12}|[?&]sig="
)

_OF_THIS_HOST = (
    "HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "HOST",
    "TERM", "TERM_*", "COLORTERM", "COLUMNS", "LINES", "TTY", "TMUX*", "STY", "WINDOWID", "DISPLAY", "WAYLAND_DISPLAY",
    "XAUTHORITY", "XDG_*", "DBUS_*", "SSH_*", "GPG_*", "KRB5CCNAME", "TMP", "TEMP", "TMPDIR", "SUDO_*", "LS_COLORS",
    "PROMPT_COMMAND", "PS1", "MODULES_*", "BASH_FUNC_*", "OMPI_MCA_orte_local_tmpdir_base", "KUBERNETES_*",
    "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK", "SM_CURRENT_*", "SM_RESOURCE_CONFIG", "SM_TRAINING_ENV",
)  # fmt: skip
_OF_THIS_PROCESS = (
    "SLURM_*", "SLURMD_*", "SRUN_*", "SBATCH_*", "PBS_*", "LSB_*", "LS_*",
    "PMI_*", "PMIX_*", "PMI2_*", "PALS_*", "HYDRA_*", "HYDI_*", "MPI_LOCAL*", "MPIEXEC_*", "OMPI_COMM_*",
    "OMPI_UNIVERSE_*", "OMPI_APP_*", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE_*", "OMPI_FIRST_*", "OMPI_NUM_APP_*",
    "ORTE_*", "PRTE_*",
    "RINGRUN_*",
)  # fmt: skip
_SETTINGS = ("RINGREDUCE_*", "HOROVOD_*", "OMPI_*", "OPAL_*", "MPIR_*", "UCX_*", "FI_*", "MPI4PY_*")
_OF_EVERY_JOB = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", *_SETTINGS)
"""What ranks and the MPI need, whatever --env-allow names."""
_BY_BATCH_SYSTEM = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_PATTERN = re.compile(r"[A-Za-z_*?][A-Za-z0-9_*?]*")


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable stays on this host unless it is asked for: for its name, or for what is in it."""
    return _matches(name.upper(), SECRET_PATTERNS) or bool(_CREDENTIALS.search(value))


def parse_env(items: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that --env asks for: NAME, as it is here, or NAME=VALUE; UsageError for what is neither."""
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or "\0" in item:
            raise UsageError(f"--env {name!r}: expected NAME or NAME=VALUE, as in --env WANDB_API_KEY")
        if name.startswith("RINGRUN_") or name in SET_BY_RINGRUN:
            raise UsageError(f"--env {name}: ringrun sets this variable itself")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: there is no such variable here; set it, or give --env {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def parse_allowed(text: str | None, flag: str) -> Sequence[str]:
    """Return the names and patterns that --env-allow lists; without it all are allowed."""
    allowed = ["*"] if text is None else [word.strip() for word in text.split(",")]
    if not all(map(_PATTERN.fullmatch, allowed)):
        raise UsageError(
            f"{flag} {text}: expected names of variables and patterns with commas between them: CUDA_*,LANG"
        )
    return allowed


def leave_outer_job(environ: MutableMapping[str, str]) -> list[str]:
    """Remove from ringrun's own `environ` what a rank has of its job; return the names that no ringrun has set there.

    A ringrun that runs in a rank starts another job: its ranks are no spares of the first, and keep other commits.
    """
    in_rank = _ERROR_FILE in environ
    names = [name for name in (*SET_BY_RINGRUN, *(_OF_OUTER_JOB if in_rank else ())) if name in environ]
    for name in names:
        del environ[name]
    return [] if in_rank else names


def leave_batch_system(environ: MutableMapping[str, str], patterns: Sequence[str]) -> None:
    """Remove from `environ` what a batch system, or an MPI, has set for this one process, and what else is named."""
    for name in [name for name in environ if _matches(name, (*_OF_THIS_PROCESS, *patterns))]:
        del environ[name]


def forwarded(environ: Mapping[str, str], asked: Mapping[str, str], *, gpus_are_chosen: bool) -> dict[str, str]:
    """Return the variables for ranks on other hosts: those of `environ` that may leave, and all that are `asked` for.

    gpus_are_chosen:  a batch system has told each host which of its GPUs are this job's.
    """
    stays = (*_OF_THIS_HOST, *_OF_THIS_PROCESS, *(_BY_BATCH_SYSTEM if gpus_are_chosen else ()))
    kept = {name: value for name, value in environ.items() if not (is_secret(name, value) or _matches(name, stays))}
    return {**kept, **asked}


def settings_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for ranks on hosts that keep their own: the settings of ringreduce and of the MPI."""
    kept = ((name, value) for name, value in environ.items() if _matches(name, _SETTINGS))
    return {name: value for name, value in kept if not _matches(name, _OF_THIS_PROCESS) and not is_secret(name, value)}


def withheld(environ: Mapping[str, str], asked: Mapping[str, str], allowed: Sequence[str] = ("*",)) -> list[str]:
    """Return the names of the secrets that stay here, and of what is not allowed to leave."""
    leave = (*allowed, *_OF_EVERY_JOB, *_OF_THIS_HOST, *_OF_THIS_PROCESS)
    stay = (name for name, value in environ.items() if is_secret(name, value) or not _matches(name, leave))
    return sorted(name for name in stay if name not in asked)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
