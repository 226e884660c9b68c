"""train_imagenet.py, which writes down what it trains on; rank 1 is killed after its third step, before the commit.

ringrun --elastic -np 3 python killed_in_training.py EXAMPLES_DIR SEEN_DIR [arguments of train_imagenet.py]
"""

import itertools
import os
import signal
import sys

sys.path.insert(0, sys.argv.pop(1))
import train_imagenet

seen = open(f"{sys.argv.pop(1)}/{os.getpid()}", "w", buffering=1)  # noqa: SIM115
Images, Sampler = train_imagenet.Images, train_imagenet.hvd.elastic.ElasticSampler
look_up, record, steps = Images.__getitem__, Sampler.record_batch, itertools.count(1)


def look_up_and_say(images, index):
    if images.is_training:
        seen.write(f"{images.epoch} {index}\n")
    return look_up(images, index)


def record_or_die(*arguments):
    if os.environ["RANK"] == "1" and next(steps) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    record(*arguments)


Images.__getitem__, Sampler.record_batch = look_up_and_say, record_or_die
train_imagenet.main()
