"""`python -m glm5fn prepare`: shards that depend on the texts alone, in Megatron's format, however the run went."""

import json
import struct
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from lines import PACKED
from pyarrow import parquet
from tokenizers import Tokenizer, models

from glm5fn import prepare as module
from glm5fn import shards, sources
from glm5fn.__main__ import main
from glm5fn.indexed import open_shard, write_index

TEXTS = ["first", "", "second\r\nline", "\u2028 stays", "a long one " * 40, "the last \u00e9\u4e16"]
END = 256


def rows(texts):
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def expected(texts):
    return [[*text.encode(), END] for text in texts if text]


@pytest.fixture
def small(monkeypatch):
    """Blocks of a few rows."""
    monkeypatch.setattr(sources, "SIZE", 64)


@pytest.fixture
def run(tmp_path, capsys):
    def run(*argv, out="out"):
        argv = argv if "--workers" in argv else (*argv, "--workers", 1)
        code = main(["prepare", *map(str, argv), "--out", str(tmp_path / out)])
        return code, "".join(capsys.readouterr())

    return run


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("shard_*"))}


def documents(directory):
    found = []
    for path in sorted(directory.glob("*.idx")):
        shard = open_shard(path.with_suffix(""))
        found += [shard.tokens[a:b].tolist() for a, b in zip(shard.begins, shard.begins[1:], strict=False)]
    return found


def test_the_documents_of_several_files_stand_in_order_in_shards_of_whole_ones(run, small, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS))
    (tmp_path / "b.txt").write_text("one text of its own " * 20)
    code, said = run(tmp_path / "a.jsonl", tmp_path / "b.txt", "--shard-tokens", 300)
    assert code == 0 and "6 documents" in said
    assert documents(tmp_path / "out") == expected([*TEXTS, "one text of its own " * 20])
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin", ".idx", ".json"}
    assert (
        len(contents(tmp_path / "out"))
        == 2 * json.loads((tmp_path / "out" / "prepared.json").read_text())["shards"]
        > 2
    )


def test_any_number_of_processes_writes_the_same_bytes(run, small, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS * 7))
    for workers in (1, 2, 4):
        assert run(tmp_path / "a.jsonl", "--workers", workers, "--shard-tokens", 500, out=f"out{workers}")[0] == 0
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out4")


def test_packed_files_and_other_formats_give_the_same_documents(run, tmp_path):
    for suffix, pack in PACKED.items():
        (tmp_path / f"a{suffix}").write_bytes(pack(rows(TEXTS)))
    parquet.write_table(pyarrow.table({"text": TEXTS, "n": range(len(TEXTS))}), tmp_path / "a.parquet")
    for suffix in (*PACKED, ".parquet"):
        assert run(tmp_path / f"a{suffix}", out=f"out{suffix}")[0] == 0
        assert documents(tmp_path / f"out{suffix}") == expected(TEXTS)


@pytest.mark.parametrize("blocks", [0, 1, 3, 9])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(run, small, tmp_path, monkeypatch, blocks):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS * 5))
    (tmp_path / "b.txt").write_text("one text of its own " * 20)
    argv = [tmp_path / "a.jsonl", tmp_path / "b.txt", "--workers", "1", "--shard-tokens", "700"]
    assert run(*argv, out="straight")[0] == 0
    monkeypatch.setattr(shards, "RECORD_EVERY", -1.0)
    left, real = blocks, module.encode_block

    def failing(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, "encode_block", failing)
    code, said = run(*argv)
    assert code == 1 and "interrupted; the same call goes on" in said
    monkeypatch.setattr(module, "encode_block", real)
    for path in (tmp_path / "out").glob("*.bin"):  # written, but not recorded
        if not path.with_suffix(".idx").exists():
            path.write_bytes(path.read_bytes() + b"what came after the last record")
    assert run(*argv)[0] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_run_that_was_killed_anywhere_in_its_writing_goes_on_to_the_same_bytes(run, small, tmp_path, monkeypatch):
    """Each time that something is put on disk, it stops there."""
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS * 3))
    argv = [tmp_path / "a.jsonl", "--workers", "1", "--shard-tokens", "300"]
    run(*argv, out="straight")
    monkeypatch.setattr(shards, "RECORD_EVERY", -1.0)
    stopped, real = 0, shards.sync
    for at in count():
        left = at

        def failing(path):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            real(path)

        monkeypatch.setattr(shards, "sync", failing)
        code, _ = run(*argv, out=f"out{at}")
        monkeypatch.setattr(shards, "sync", real)
        if code == 0:
            break
        stopped += 1
        assert run(*argv, out=f"out{at}")[0] == 0
        assert contents(tmp_path / f"out{at}") == contents(tmp_path / "straight")
        assert {path.suffix for path in (tmp_path / f"out{at}").iterdir()} == {".bin", ".idx", ".json"}
        assert not (tmp_path / f"out{at}" / "progress.json").exists()
    assert stopped > 30


def test_inputs_or_a_tokenizer_that_changed_are_refused(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(["aaa"]))
    own = Tokenizer(models.WordLevel({"?": 0, "E": 1, "aaa": 2}, unk_token="?"))
    own.save(str(tmp_path / "tokenizer.json"))
    argv = [tmp_path / "a.jsonl", "--tokenizer", tmp_path / "tokenizer.json", "--end", "E"]
    assert run(*argv)[0] == 0
    Tokenizer(models.WordLevel({"?": 0, "E": 1, "bbb": 2}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    code, said = run(*argv)
    assert code == 2 and "begun with another tokenizer_checksum" in said
    own.save(str(tmp_path / "tokenizer.json"))
    assert run(*argv)[0] == 0
    (tmp_path / "a.jsonl").write_bytes(rows(["bbb"]))
    code, said = run(*argv)
    assert code == 2 and "begun with another inputs" in said


def test_a_record_that_cannot_be_read_or_shards_that_are_gone_are_named(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS))
    run(tmp_path / "a.jsonl")
    (tmp_path / "out" / "shard_00000.bin").rename(tmp_path / "gone.bin")
    code, said = run(tmp_path / "a.jsonl")
    assert code == 1 and "shard_00000.bin: is not there" in said
    (tmp_path / "out" / "prepared.json").write_text("")
    code, said = run(tmp_path / "a.jsonl")
    assert code == 2 and "prepared.json cannot be read" in said
    code, said = run(tmp_path / "a.jsonl", "--end", "E", out="other")
    assert code == 2 and "bytes have an end of their own" in said


def test_what_is_whole_stays_as_it_is_and_another_call_is_refused(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS))
    run(tmp_path / "a.jsonl")
    before = contents(tmp_path / "out")
    code, said = run(tmp_path / "a.jsonl")
    assert code == 0 and "nothing left to do" in said
    code, said = run(tmp_path / "a.jsonl", "--shard-tokens", 9)
    assert code == 2 and "begun with another shard_tokens" in said
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    code, said = run(tmp_path / "a.jsonl", out="full")
    assert code == 2 and "holds something else" in said
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_row_is_named_by_file_and_line_or_left_out_and_counted(run, tmp_path, workers):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS[:2]) + b'{"text": "abc\n' + rows(TEXTS[2:]))
    code, said = run(tmp_path / "a.jsonl", "--workers", workers)
    assert code == 1 and f"{tmp_path / 'a.jsonl'}:3: " in said
    code, said = run(tmp_path / "a.jsonl", "--workers", workers, "--skip-bad", out="skipped")
    assert code == 0 and "1 rows left out" in said and "a.jsonl:3: " in said
    assert documents(tmp_path / "skipped") == expected(TEXTS)


def test_a_reader_written_from_the_published_layout_reads_ours(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS))
    run(tmp_path / "a.jsonl")
    index, data = ((tmp_path / "out" / f"shard_00000.{suffix}").read_bytes() for suffix in ("idx", "bin"))
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, listed = struct.unpack("<QBQQ", index[9:34])
    assert (version, code) == (1, 8) and listed == sequences + 1
    lengths = struct.unpack(f"<{sequences}i", index[34 : 34 + 4 * sequences])
    at = 34 + 4 * sequences
    starts = struct.unpack(f"<{sequences}q", index[at : at + 8 * sequences])
    firsts = struct.unpack(f"<{listed}q", index[at + 8 * sequences :])
    found = [struct.unpack(f"<{n}H", data[start : start + 2 * n]) for n, start in zip(lengths, starts, strict=True)]
    assert [list(ids) for ids in found] == expected(TEXTS) and list(firsts) == list(range(listed))


def test_a_pair_of_another_program_is_read_documents_of_several_sequences_too(tmp_path):
    lengths, firsts = [2, 1, 3], [0, 2, 3]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    index += struct.pack("<3i", *lengths) + struct.pack("<3q", 0, 8, 12) + struct.pack("<3q", *firsts)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(struct.pack("<6i", *range(6)))
    shard = open_shard(tmp_path / "x")
    assert shard.tokens.tolist() == list(range(6)) and shard.begins.tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index, data: (b"x" + index[1:], data), "must begin with"),
        (lambda index, data: (index[:-3], data), "bytes, must have 82 for its 2 sequences"),
        (lambda index, data: (index[:20] + b"\x40" + index[21:], data), "bytes, must have"),
        (lambda index, data: (index[:20], data), "must be of version 1"),
        (lambda index, data: (index, data[:-2]), "must follow each other and fill"),
        (lambda index, data: (index[:9] + b"\x02" + index[10:], data), "must be of version 1"),
    ],
)
def test_a_damaged_pair_is_refused_by_name(tmp_path, change, said):
    with (tmp_path / "x.idx").open("wb") as file:
        write_index(file, np.dtype("<u2"), np.array([2, 3]))
    data = np.arange(5, dtype="<u2").tobytes()
    index, data = change((tmp_path / "x.idx").read_bytes(), data)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(ValueError, match="x.idx: .*" + said):
        open_shard(Path(tmp_path / "x"))
