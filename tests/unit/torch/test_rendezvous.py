"""When the ranks tell torch who they are."""

from ringreduce.torch.rendezvous import ASKED, needs_variables
from tests.support.loops import in_a_loop

SET = dict.fromkeys(ASKED, "1")


@in_a_loop(
    ("environ", "needs"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"PMI_SIZE": "2"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "RANK": "1"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", **SET}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", **SET, "MASTER_PORT": ""}, True),
    ],
)
def test_an_mpi_launcher_has_not_set_them(environ, needs):
    assert needs_variables(environ) is needs
