"""Many trainings on one allocation: teams of ranks try hyperparameters that Optuna suggests, each team data-parallel.

def objective(trial):                                          # called on all ranks of a team
    rate = trial.suggest_float("rate", 1e-3, 1, log=True)
    ...                                                        # process_set=trial.process_set
    return accuracy

found = rr.sweep(objective, trials=16, ranks=2, direction="maximize", storage="sweep.db")

study.py    on rank 0: Optuna's study, asked by all teams
trial.py    on each rank: what an objective gets
teams.py    the teams, and how their first ranks ask rank 0
sweep.py    the loop of a team
"""

from ringreduce.sweeps.study import Finished as Finished
from ringreduce.sweeps.sweep import sweep as sweep
from ringreduce.sweeps.trial import Pruned as Pruned
from ringreduce.sweeps.trial import Trial as Trial

__all__ = ["Finished", "Pruned", "Trial", "sweep"]
