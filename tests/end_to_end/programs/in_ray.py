"""Ranks that are Ray's actors, by RayExecutor."""

import os

import ray

from ringreduce.errors import StartupError
from ringreduce.ray import RayExecutor


def add(step):
    import ringreduce as hvd

    hvd.init()
    total = float(hvd.allreduce(float(step * (hvd.rank() + 1)), op=hvd.Sum))
    return hvd.rank(), hvd.size(), hvd.local_rank(), total, os.getpid()


def raises():
    import ringreduce as hvd

    if hvd.rank() == 1:
        raise KeyError("shard")
    hvd.allreduce(1.0, name="never")


class Model:
    def __init__(self, scale, bias):
        self.scale, self.bias, self.steps = scale, bias, 0

    def step(self):
        import ringreduce as hvd

        self.steps += 1
        return self.scale * hvd.rank() + self.bias, self.steps, os.environ["MARK"]


def main():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), num_workers=2)
    executor.start(Model, [10], {"bias": 1}, {"MARK": "a"})
    runs = [executor.run(add, [1]), executor.run(add, kwargs={"step": 2}), ray.get(executor.run_remote(add, [3]))]
    print("run", [[each[:4] for each in run] for run in runs])
    print("the same actors", len({tuple(each[4] for each in run) for run in runs}) == 1)
    print("execute", executor.execute(lambda model: model.step()), executor.execute(lambda model: model.step()))
    print("execute_single", executor.execute_single(lambda model: model.steps))
    for called, expected in ((raises, KeyError), (raises, StartupError)):
        try:
            executor.run(called)
        except expected as error:
            print("raised", expected.__name__, str(error).splitlines()[-1])
    executor.shutdown()


if __name__ == "__main__":
    main()
