"""Several corpora, token shards and packed files as the data of a run."""

import gzip
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tiny import PLAIN, tiny

from glm5fn.__main__ import main
from glm5fn.corpora import open_data
from glm5fn.data import PATTERN, Data, held_out_batches, micro_batches, permutation, spread
from glm5fn.indexed import write_index
from glm5fn.kernels.reference import IGNORE
from glm5fn.settings import DataConfig

MODEL = tiny(**PLAIN, vocab_size=293, max_position_embeddings=64)
TEXTS = [f"text number {n}, " + "and so on " * (n % 7) for n in range(40)]


def rows(texts):
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def open_(*paths, **settings):
    cfg = DataConfig(path=tuple(map(str, paths)), **({"seq_len": 16, "held_out": 0.0} | settings))
    return open_data(cfg, MODEL, seed=5)


def everything(samples):
    return samples[np.arange(len(samples))]


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(part, other[name]) for name, part in one.items())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A text as jsonl, packed, and as shards; and another text."""
    root = tmp_path_factory.mktemp("files")
    (root / "a.jsonl").write_bytes(rows(TEXTS))
    (root / "a.jsonl.gz").write_bytes(gzip.compress(rows(TEXTS)))
    (root / "b.txt").write_text("another text of its own. " * 40)
    argv = ["prepare", str(root / "a.jsonl"), "--workers", "1"]
    assert main([*argv, "--out", str(root / "one")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm5fn.sources.SIZE", 64)
        assert main([*argv, "--out", str(root / "several"), "--shard-tokens", "400"]) == 0
    return root


@pytest.mark.parametrize("packing", ["stream", "concatenate", "best-fit"])
def test_a_text_packed_or_prepared_gives_the_samples_of_the_text(files, packing):
    plain = open_(files / "a.jsonl", packing=packing, held_out=0.1)
    for name in ("a.jsonl.gz", "one", "one/shard_00000.idx", "one/shard_00000.bin"):
        other = open_(files / name, packing=packing, held_out=0.1)
        assert len(plain.held_out) == len(other.held_out) > 1
        assert same(everything(other.train[0]), everything(plain.train[0]))
        assert same(everything(other.held_out), everything(plain.held_out))


@pytest.mark.parametrize("packing", ["stream", "concatenate", "best-fit"])
def test_the_tokens_of_several_shards_are_targets_once(files, packing):
    data = open_(files / "several", packing=packing, held_out=0.2)
    assert len(list((files / "several").glob("*.idx"))) > 2
    targets = [id for part in (*data.train, data.held_out) for id in everything(part)["targets"].flatten().tolist()]
    text = Counter(id for text in TEXTS for id in [*text.encode(), 256])
    first = sum((Counter(text.encode()[:1]) for text in TEXTS), Counter())
    found = Counter(targets)
    del found[IGNORE]
    if packing != "stream":
        assert found == text - first
    else:  # but the first of each shard
        assert (text - found).total() == len(list((files / "several").glob("*.idx")))


@pytest.mark.parametrize("packing", ["stream", "concatenate", "best-fit"])
def test_what_is_held_out_goes_back_through_as_many_shards_as_it_takes(tmp_path, packing):
    lengths = {"shard_00000": [9] * 60, "shard_00001": [9] * 30, "shard_00002": [5]}
    for name, sizes in lengths.items():
        np.arange(sum(sizes), dtype="<u2").__mod__(250).astype("<u2").tofile(tmp_path / f"{name}.bin")
        with (tmp_path / f"{name}.idx").open("wb") as file:
            write_index(file, np.dtype("<u2"), np.array(sizes))
    data = open_(tmp_path, seq_len=8, packing=packing, held_out=0.4)
    total = len(data.train[0]) + len(data.held_out)
    assert len(data.held_out) == round(0.4 * total) > len(open_(tmp_path / "shard_00001.idx", seq_len=8).train[0])
    held, trained = (Counter(everything(part)["targets"].flatten().tolist()) for part in (data.held_out, data.train[0]))
    whole = Counter(everything(open_(tmp_path, seq_len=8, packing=packing).train[0])["targets"].flatten().tolist())
    assert held + trained == whole


def test_each_of_many_corpora_is_ordered_once_an_epoch(files, monkeypatch):
    data = open_(*[files / "a.jsonl"] * 9, weights=(1.0,) * 9)
    calls, real = [], permutation
    monkeypatch.setattr("glm5fn.data.permutation", lambda *args: calls.append(args) or real(*args))
    for step in range(20):
        data.rows(np.arange(9) + 9 * step)
    assert len(calls) == len(set(calls)) == 9


def test_without_weights_every_sample_of_all_paths_is_read_once_in_an_epoch(files):
    data = open_(files / "a.jsonl", files / "b.txt")
    sizes = [len(open_(files / name).train[0]) for name in ("a.jsonl", "b.txt")]
    assert len(data.train) == 1 and len(data.train[0]) == sum(sizes)
    assert sorted(data.places(np.arange(sum(sizes)))[1].tolist()) == [*range(sum(sizes))]


def test_weights_say_how_many_of_the_samples_are_of_each_path_wherever_one_looks(files):
    weights = (0.7, 0.2, 0.1)
    data = open_(files / "a.jsonl", files / "b.txt", files / "one", weights=weights)
    for first, count in ((0, 100), (12345, 100), (5 * PATTERN - 50, 100), (0, PATTERN)):
        which, _ = data.places(np.arange(first, first + count))
        shares = np.bincount(which, minlength=3) / count
        assert np.allclose(shares, weights, atol=1.5 / count)
    which, index = data.places(np.arange(2 * PATTERN))
    for n, part in enumerate(data.train):
        size = len(part)
        mine = index[which == n]
        epochs = [mine[at : at + size] for at in range(0, len(mine) - size, size)]
        assert len(epochs) > 3 and all(sorted(epoch) == [*range(size)] for epoch in epochs)
        assert not np.array_equal(epochs[0], epochs[1])


def test_a_path_that_would_never_be_read_is_refused(files):
    with pytest.raises(ValueError, match=r"b\.txt: data\.weights are so small that it would never be read"):
        open_(files / "a.jsonl", files / "b.txt", weights=(1.0, 1e-6))


@pytest.mark.parametrize("weights", [(1.0,), (3, 1), (1 / 3, 1 / 3, 1 / 3), (0.9999, 0.0001), (5, 2, 2, 1, 0.5)])
def test_the_pattern_of_weights_is_as_even_as_can_be(weights):
    order = np.array(spread(weights))
    assert len(order) == PATTERN
    for n, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs((order == n).mean() - share) <= 1 / PATTERN
        behind = np.cumsum(order == n) - share * np.arange(1, PATTERN + 1)
        assert np.abs(behind).max() <= 1.5


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
@pytest.mark.parametrize("stop", [1, 7, 23])
def test_a_run_that_goes_on_with_other_ranks_sees_the_samples_of_one_that_did_not_stop(files, packing, stop):
    cfg = DataConfig(seq_len=16, global_batch=8, micro_batch=2)

    def open_all():
        return open_(files / "a.jsonl", files / "b.txt", weights=(2.0, 1.0), packing=packing)

    def steps(data, numbers, ranks):
        for n in numbers:
            batches = [batch for rank in range(ranks) for batch in micro_batches(data, cfg, rank, ranks, 8 * n)]
            yield {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

    assert sum(map(len, open_all().train)) < 8 * 30  # over the ends of epochs
    straight = list(steps(open_all(), range(30), 1))
    resumed = [*steps(open_all(), range(stop), 2), *steps(open_all(), range(stop, 30), 4)]
    assert all(same(one, other) for one, other in zip(straight, resumed, strict=True))


def test_sets_with_and_without_segments_are_read_together(files):
    packed, plain = (open_(files / "a.jsonl", seq_len=40, packing=packing) for packing in ("concatenate", "stream"))
    data = Data(train=[packed.train[0], plain.train[0]], held_out=plain.held_out, seed=None, order=(0, 1))
    found = data.rows(np.arange(4))
    assert np.all(found["segments"][1::2] == 1) and found["segments"][::2].max() > 1
    assert same({name: part[::2] for name, part in found.items()}, packed.train[0][np.arange(2)])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_held_out_window_of_documents_is_counted_once(files, ranks):
    data, cfg = open_(files / "a.jsonl", packing="best-fit", held_out=0.3), DataConfig(seq_len=16, micro_batch=2)
    parts = [list(held_out_batches(data, cfg, rank, ranks)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    found = Counter(id for part in parts for batch in part for id in batch["targets"].flatten().tolist())
    wanted = Counter(everything(data.held_out)["targets"].flatten().tolist())
    del found[IGNORE], wanted[IGNORE]
    assert found == wanted and wanted.total() > 20


def test_bad_rows_are_left_out_on_request_and_named(files, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(rows(TEXTS[:3]) + b'{"text": 3}\n' + rows(TEXTS[3:]) + b"[]\n")
    data = open_(tmp_path / "x.jsonl", skip_bad=True)
    assert same(everything(data.train[0]), everything(open_(files / "a.jsonl").train[0]))
    (said,) = data.notices
    assert f"2 bad rows left out: {tmp_path / 'x.jsonl'}:4: 'text' is of type int" in said and "x.jsonl:42: " in said


def test_a_directory_that_is_not_whole_is_refused(files, tmp_path):
    (tmp_path / "progress.json").write_text("{}")
    with pytest.raises(ValueError, match="is not whole: run the same `python -m glm5fn prepare` again"):
        open_(tmp_path)


def test_shards_with_ids_that_the_model_lacks_are_refused_when_they_are_read(tmp_path):
    np.arange(280, 320, dtype="<u2").tofile(tmp_path / "x.bin")
    with (tmp_path / "x.idx").open("wb") as file:
        write_index(file, np.dtype("<u2"), np.array([30, 10]))
    with pytest.raises(ValueError, match=r"x: has token \d+, must be from 0 to vocab_size \(293\) - 1"):
        everything(open_(tmp_path / "x.idx").train[0])


def test_no_document_of_two_tokens_is_an_error(tmp_path):
    np.arange(5, dtype="<u2").tofile(tmp_path / "x.bin")
    with (tmp_path / "x.idx").open("wb") as file:
        write_index(file, np.dtype("<u2"), np.ones(5, np.int32))
    with pytest.raises(ValueError, match=r"x\.idx: has no document of at least two tokens"):
        open_(tmp_path / "x.idx", packing="best-fit")


def test_a_model_without_room_for_the_tokens_is_refused_by_size(files):
    with pytest.raises(ValueError, match=r"bytes has 257 tokens, so vocab_size \(99\) must be at least 257"):
        open_data(DataConfig(path=(str(files / "a.jsonl"),)), replace(MODEL, vocab_size=99), seed=0)
