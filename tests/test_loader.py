"""Batches that are made while a step computes."""

import threading
import time

import pytest

from glm5fn.loader import Ahead
from glm5fn.mesh import RunError


def test_each_call_gets_its_own_batch_and_the_next_is_made_meanwhile():
    made, ready = [], threading.Event()

    def make(start):
        made.append((start, threading.current_thread() is threading.main_thread()))
        if len(made) == 2:
            ready.set()
        return start * 10

    load = Ahead(make, stride=4)
    assert load(8) == 80
    assert ready.wait(10) and made == [(8, False), (12, False)]
    assert load(12) == 120 and load(0) == 0  # where a run begins anew
    assert load(4) == 40 and load.waited < 1


def test_what_goes_wrong_is_raised_by_the_call_that_asks_for_it():
    def make(start):
        if start == 4:
            raise ValueError("shard_00001: has token 300")
        return start

    load = Ahead(make, stride=4)
    assert load(0) == 0
    with pytest.raises(RunError, match="shard_00001: has token 300"):
        load(4)


def test_data_that_do_not_come_are_an_error_and_no_hang():
    never = threading.Event()
    load = Ahead(lambda start: never.wait(60), stride=1, patience=0.1)
    began = time.perf_counter()
    with pytest.raises(RunError, match=r"the data of sample 3 did not come in 0\.1 s"):
        load(3)
    assert time.perf_counter() - began < 5
    never.set()
