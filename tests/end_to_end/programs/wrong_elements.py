"""Counts wrong elements with what the benches count them with: of sums, and of gradients."""

import allreduce
import numpy as np
from common import total
from reducers import Gradients, Reducer, ours

import ringreduce as rr


def off_by_one_at_rank_1(array):
    rr.allreduce_(array, op=rr.Sum)
    array[7] += rr.rank()


def one_row_is_zero():
    right.run()
    gradients.arrays[1][2] = 0


rr.init()
array = np.zeros(100, np.float32)
print("buffer", allreduce.wrong_elements(off_by_one_at_rank_1, array, allreduce.expected_sum(100, 2)))
gradients = Gradients([(3, 5), (40,)])
right = ours(gradients, rr, gradients.arrays)
print("right", total(gradients.wrong(right)))
print("wrong", total(gradients.wrong(Reducer(one_row_is_zero, right.results))))
print("not reduced", total(gradients.wrong(Reducer(lambda: None, right.results))))
