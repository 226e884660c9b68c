"""What ssh is told, tried with the real ssh, which prints what it has understood (`ssh -G`)."""

import subprocess

import pytest

from ringrun.errors import UsageError
from ringrun.ssh import FILE_NAME, SshOptions, check_identity_file, config_text, parse_ssh, ssh_argv


def written(folder, options, aliases=None):
    """The argv of an ssh that reads a file with them."""
    (folder / FILE_NAME).write_text(config_text(options, aliases or {}))
    return ssh_argv(str(folder))


def understood(argv, host):
    """What ssh would do for `host`."""
    done = subprocess.run([*argv, "-G", host], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in reversed(done.stdout.splitlines()))


def test_ssh_understands_what_a_job_needs(tmp_path):
    key = tmp_path / "my key 100% \\x\\\\y"
    key.touch()
    options = SshOptions(2222, check_identity_file(str(key), "-i"), connect_timeout_s=7.4)
    told = understood(written(tmp_path, options, {"ringrun-host-0": "fe80::2%eth0"}), "h1")
    assert (told["port"], told["batchmode"], told["connecttimeout"]) == ("2222", "yes", "7")
    assert told["identityfile"].replace("%%", "%") == str(key)
    assert (told["hostname"], told["stricthostkeychecking"]) == ("h1", "ask"), "as ssh does by default"
    told = understood(["ssh", "-F", str(tmp_path / "ssh_config")], "ringrun-host-0")
    assert (told["hostname"], told["hostkeyalias"], told["port"]) == ("fe80::2%eth0", "fe80::2%eth0", "2222")


def test_what_is_not_said_is_left_to_the_user_s_own_configuration(tmp_path):
    told = understood(written(tmp_path, SshOptions()), "h1")
    default = understood(["ssh", "-F", "none"], "h1")
    assert (told["port"], told["connecttimeout"]) == ("22", "30")
    assert told["identityfile"] == default["identityfile"]
    assert "Include ~/.ssh/config" in (tmp_path / "ssh_config").read_text().splitlines()


@pytest.mark.parametrize(("lost_after_s", "interval_s"), [(8.0, 2), (60.0, 15), (1.0, 1)])
def test_a_connection_to_a_silent_host_ends_when_ringrun_gives_it_up(tmp_path, lost_after_s, interval_s):
    told = understood(written(tmp_path, SshOptions(lost_after_s=lost_after_s)), "h1")
    assert (told["serveraliveinterval"], told["serveralivecountmax"]) == (str(interval_s), "3")


def test_ports():
    assert parse_ssh("22", None, 1.0).port == 22
    for text in ("", "0", "65536", "-1", "2²", "22 ", "9" * 5000):
        with pytest.raises(UsageError, match=r"^--ssh-port: expected a port from 1 to 65535, got"):
            parse_ssh(text, None, 1.0)


def test_keys(tmp_path):
    quoted, variable = tmp_path / 'a"b', tmp_path / "${HOME}"
    for each in (quoted, variable):
        each.touch()
    for path, message in (
        (quoted, "a quote"),
        (variable, "a quote"),
        (tmp_path, "no such file"),
        (tmp_path / "none", "no such file"),
    ):
        with pytest.raises(UsageError, match=message):
            check_identity_file(str(path), "-i")
