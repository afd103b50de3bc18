"""Documents in windows: what is a target, where documents are cut, and that packed ones count as if each were alone."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_layouts import ALL, gathered, make
from tiny import PLAIN, distance, tiny

from glm5fn import step
from glm5fn.kernels.reference import IGNORE
from glm5fn.losses import counts
from glm5fn.packing import Corpus, Windows, pack, pieces_of
from glm5fn.settings import MeshConfig
from glm5fn.tree import tree_map

LENGTHS = (7, 0, 9, 1, 25, 3, 3, 11, 2)
SEQ = 10


def corpus(lengths=LENGTHS, size=29, **more):
    """Documents of so many tokens, none of which is twice in one."""
    ids = [np.arange(3 * n, 3 * n + length) % size for n, length in enumerate(lengths)]
    begins = np.cumsum([0, *lengths])
    return Corpus(name="it", tokens=np.concatenate(ids).astype(np.uint16), begins=begins, size=size, **more)


def pairs_of(rows):
    """What predicts what, each with its document among those of its window."""
    found = []
    for tokens, targets, segments in zip(rows["tokens"], rows["targets"], rows["segments"], strict=True):
        keep = targets != IGNORE
        assert not np.any(segments[keep] == 0)
        found += zip(tokens[keep].tolist(), targets[keep].tolist(), strict=True)
    return sorted(found)


def expected_pairs(it):
    documents = [it.tokens[a:b].tolist() for a, b in pairwise(it.begins)]
    return sorted(pair for ids in documents for pair in pairwise(ids))


def everything(windows):
    return windows[np.arange(len(windows))]


@pytest.mark.parametrize("make", [lambda it: Windows(it, SEQ, apart=True), lambda it: pack(it, SEQ)])
def test_every_token_but_the_first_of_its_document_is_a_target_once(make):
    it = corpus()
    assert pairs_of(everything(make(it))) == expected_pairs(it)


def test_no_document_that_fits_is_cut_and_longer_ones_are_cut_at_windows():
    windows = pack(corpus(), SEQ)
    sizes = sorted(windows.sizes.tolist())
    assert sizes == sorted([6, 8, 10, 10, 4, 2, 2, 10, 1])  # of 25 tokens, 24 predict another: 10, 10 and 4
    assert len(windows) == 6  # 53 in windows of 10
    rows = everything(windows)
    assert {name: part.shape for name, part in rows.items()} == dict.fromkeys(rows, (6, SEQ))
    assert all(sorted(set(row)) in ([*range(max(row) + 1)], [*range(1, max(row) + 1)]) for row in rows["segments"])


def test_windows_follow_the_text_by_the_documents_with_which_they_begin():
    windows = pack(corpus((3,) * 40), SEQ)
    begins = windows.starts[windows.bounds[:-1]]
    assert np.all(np.diff(begins) > 0)


@pytest.mark.parametrize("seed", range(4))
def test_each_piece_goes_where_the_least_room_is_left(seed):
    lengths = np.random.default_rng(seed).integers(0, 14, 60)
    rooms = []  # slow: of all open windows
    for size in sorted((min(s, SEQ) for n in lengths if n > 1 for s in [n - 1, n - 1 - SEQ] if s > 0), reverse=True):
        fitting = [room for room in rooms if room >= size]
        rooms.append((rooms.pop(rooms.index(min(fitting))) if fitting else SEQ) - size)
    windows = pack(corpus(lengths), SEQ)
    filled = np.add.reduceat(windows.sizes, windows.bounds[:-1])
    assert sorted(SEQ - filled) == sorted(rooms)


def test_concatenated_documents_keep_their_numbers_and_seams_have_no_label():
    rows = Windows(corpus((3, 0, 4, 6)), 5, apart=True)[np.arange(3)]
    assert rows["segments"].tolist() == [[1, 1, 1, 3, 3], [1, 1, 2, 2, 2], [1, 1, 1, 0, 0]]
    blank = [[n for n, target in enumerate(row) if target == IGNORE] for row in rows["targets"]]
    assert blank == [[2], [1], [2, 3, 4]]


def test_only_what_is_learned_is_a_target():
    learned = np.arange(sum(LENGTHS)) % 3 == 0
    it = corpus(learned=learned)
    for windows in (pack(it, SEQ), Windows(it, SEQ), Windows(it, SEQ, apart=True)):
        plain = type(windows)(replace(it, learned=None), *list(vars(windows).values())[1:])
        masked, whole = everything(windows)["targets"], everything(plain)["targets"]
        assert np.all((masked == whole) | (masked == IGNORE))
        first = {int(it.tokens[b]) for b in it.begins[:-1] if b < len(it.tokens)}
        assert (masked != IGNORE).sum() in range(learned.sum() - len(first), learned.sum() + 1)


def test_an_id_that_the_model_does_not_have_is_refused_where_it_is_read():
    it = replace(corpus(), size=20)
    with pytest.raises(ValueError, match=r"it: has token 2\d, must be from 0 to vocab_size \(20\) - 1"):
        everything(pack(it, SEQ))


ALONE = {"model": tiny(**PLAIN | {"num_nextn_predict_layers": 1, "num_mtp_depths": 2}), "mtp": ALL["mtp"]}
MODELS = {"gqa": ALONE, "all": ALL}  # with all there is, of which each query attends to four keys


def gradient(grid, model, batches, count):
    """The sums of the loss's parts, and its gradient."""
    setup, state = make(grid, **MODELS[model])
    sums, grads = step.gradient(setup, state.params, batches, count)
    return {"sums": tree_map(lambda part: part.double(), sums), **gathered(grads)}


def as_batch(rows):
    return {name: torch.from_numpy(part) for name, part in rows.items()}


@cache
def of_each_document(model):
    """The gradient when each document, or piece of a long one, is a row of its own; and by what it is divided."""
    it, batches = corpus(), []
    for start, size in zip(*pieces_of(it.begins, SEQ), strict=True):
        ids = it.tokens[None, start : start + size + 1].astype(np.int64)
        batches.append(as_batch({"tokens": ids[:, :-1], "targets": ids[:, 1:]}))
    each = [counts(batch, MODELS[model]["model"]) for batch in batches]
    count = {name: int(sum(part[name] for part in each)) for name in each[0]}
    return gradient(MeshConfig(), model, batches, count), count


@pytest.mark.parametrize(
    "grid", [{}, {"cp": 2}, {"cp": 2, "cp_split": "contiguous"}], ids=["one", "cp 2", "contiguous"]
)
@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_have_the_loss_and_gradients_of_each_alone(model, grid, pools):
    expected, count = of_each_document(model)
    packed = as_batch(everything(pack(corpus(), SEQ)))
    cfg, grid = MODELS[model]["model"], MeshConfig(**grid)
    assert {name: int(part) for name, part in counts(packed, cfg).items()} == count
    assert all(count[f"mtp_{d}"] > 20 for d in (1, 2))
    args = (grid, model, [packed], count)
    for found in pools(2)(gradient, *args) if grid.cp > 1 else [gradient(*args)]:
        assert distance(found, expected) < 1e-10
