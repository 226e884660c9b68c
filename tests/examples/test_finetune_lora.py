"""finetune_lora.py on real ranks, tiny: it learns what one rank learns, and changes and saves the adapters alone."""

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import FRONT_ENDS, ringrun
from tests.examples.conftest import EXAMPLES
from tests.support import environments, jobs

TUNES = Path(__file__).parent / "programs" / "tunes.py"
LINEAR = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
REFUSED = [
    f"--layers c_attn,c_proj: the model has none of these; its linear layers: {LINEAR}",
    "--adapters together.pt: made for another model, other --layers or another --rank",
    "--weights .: expected a folder with a config.json, as save_pretrained() writes it",
    "--batch 7 cannot be shared equally by 2 ranks; pass a multiple of 2",
]


def test_adapters_alone_train_and_are_saved_and_everything_else_stays_as_it_was(tmp_path):
    packages = environments.packages("TEST_FRONT_ENDS_PYTHON", ".venv-test-front-ends", *FRONT_ENDS)
    path = f"{packages}:{EXAMPLES}:{jobs.ROOT}"
    done = ringrun(Path(sys.executable), 2, TUNES, cwd=tmp_path, returncode=0, PYTHONPATH=path, OMP_NUM_THREADS="1")
    shares = re.findall(r"^\[0\] ([\d,]+) of ([\d,]+) parameters train: (\S+)%$", done.stdout, re.MULTILINE)
    assert shares[:3] == [shares[0]] * 3
    trained, total, percent = (float(each.replace(",", "")) for each in shares[0])
    assert percent == pytest.approx(100 * trained / total, abs=0.01)
    before = [float(each) for each in re.findall(r"held-out loss (\S+) before", done.stdout)]
    after = [float(each) for each in re.findall(r"held-out loss (\S+) after", done.stdout)]
    assert before[:2] == [before[0]] * 2
    assert before[2] == after[2] == after[1], "what was saved is what was trained"
    assert after[1] < before[1] - 0.5
    assert after[1] == pytest.approx(after[0], abs=1e-3), "two ranks train what one trains"
    assert len(re.findall(r"step 20 of 20: loss \d\.\d{4}, [\d,]+ tokens/s", done.stdout)) == 2
    refused = re.findall(r"^\[0\] (--\w.*)$", done.stdout, re.MULTILINE)
    assert refused[:4] == REFUSED
    assert re.match("--weights base: the weights do not fit config.json: lm_head.weight, ", refused[4])
    assert (tmp_path / "together.pt").stat().st_size < 100_000
