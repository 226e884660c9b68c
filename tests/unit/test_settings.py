import pytest

from ringreduce.errors import SettingsError
from ringreduce.settings import Settings


def test_defaults_and_variables():
    assert Settings.from_environment({"HOME": "/root"}) == Settings()
    settings = Settings.from_environment({"RINGREDUCE_FUSION_SLOT_BYTES": "1024", "RINGREDUCE_ERROR_FILE": "/tmp/e"})
    assert settings == Settings(fusion_slot_bytes=1024, error_file="/tmp/e")


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1MiB"])
def test_a_value_that_is_no_size_is_refused(text):
    message = r"RINGREDUCE_RING_SEGMENT_BYTES='.*': expected a whole number of bytes above 0, such as \d+"
    with pytest.raises(SettingsError, match=message):
        Settings.from_environment({"RINGREDUCE_RING_SEGMENT_BYTES": text})


def test_an_unknown_variable_is_refused_with_the_nearest_known_one():
    message = "RINGREDUCE_FUSION_SLOTBYTES is no setting of ringreduce; did you mean RINGREDUCE_FUSION_SLOT_BYTES?"
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        Settings.from_environment({"RINGREDUCE_FUSION_SLOTBYTES": "1"})
    with pytest.raises(SettingsError, match="known are: RINGREDUCE_ERROR_FILE, "):
        Settings.from_environment({"RINGREDUCE_XYZZY": "1"})
