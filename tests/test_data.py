import json
import re
import tracemalloc
from dataclasses import replace
from pydoc_data.topics import topics

import numpy as np
import pyarrow
import pytest
import torch
from lines import NO_OBJECTS, PACKED, WAYS
from pyarrow import parquet
from safetensors.numpy import save
from tiny import PLAIN, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from glm5fn.corpora import open_data, tokenizer_for
from glm5fn.data import Data, Part, held_out_batches, micro_batches
from glm5fn.kernels.reference import IGNORE
from glm5fn.packing import Corpus, Windows
from glm5fn.settings import DataConfig
from glm5fn.sources import text_blocks
from glm5fn.text import BYTES, encode, open_tokenizer

MODEL = tiny(**PLAIN, vocab_size=293, max_position_embeddings=4, eos_token_id=(7, 9))


def read(path, raw=None, **settings):
    """The data of a file, written first if `raw` is given."""
    if raw is not None:
        path.write_bytes(raw)
    return open_data(
        DataConfig(path=(str(path),), **({"seq_len": 4, "held_out": 0.0, "global_batch": 1} | settings)), MODEL, seed=0
    )


def flat(documents, end=256):
    return [id for document in documents for id in [*document, end]]


def rows(batches):
    """Batches as one list of (tokens, targets)."""
    return [pair for batch in batches for pair in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True)]


def numbered(size, seed=3, held_out=0):
    """Windows of 5 numbered tokens: `size` to train on, `held_out` to evaluate on, the very last one short."""
    windows = Windows(corpus(np.arange((size + held_out) * 5 - 1)), 5)
    return Data(train=[Part(windows, 0, size)], held_out=Part(windows, size, held_out), seed=seed)


def corpus(tokens, size=10000):
    """One document of these tokens."""
    return Corpus(name="it", tokens=tokens, begins=np.array([0, len(tokens)]), size=size)


def ids(data):
    """All the tokens of a text."""
    return data.train[0].sets[0].whole.corpus.tokens.tolist()


def everything(samples):
    return samples[np.arange(len(samples))]


TEXTS = ["first", "second\r\nline", "\u2028 and \u2029 and \u0085 stay", "the last \u00e9\u4e16"]
LINES = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in TEXTS]


ESCAPED = [json.dumps({"id": float("nan"), "text": text}).encode() for text in TEXTS]
EMPTY = [row for line in LINES for row in (b'{"text": ""}', line)]


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lines", [LINES, ESCAPED, EMPTY], ids=["as is", "escaped, and NaN beside", "with empty texts"])
def test_however_the_lines_are_written_the_tokens_are_the_same(tmp_path, lines, way, suffix):
    raw = PACKED[suffix](WAYS[way](lines))
    assert ids(read(tmp_path / f"rows{suffix}", raw)) == flat(text.encode() for text in TEXTS)


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize(
    ("bad", "what"),
    [
        *NO_OBJECTS,
        (b'{"text": "\\ud800"}', "'text' has half a surrogate pair"),
        (b'{"text": null}', "'text' is of type NoneType, must be a string"),
        (b'{"text": 12}', "'text' is of type int, must be a string"),
        (b'{"text": NaN}', "'text' is of type float, must be a string"),
        (b'{"body": "abc", "id": 1}', "has no 'text': must have one, or the field must be one of ['body', 'id']"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_row_is_refused_with_its_file_and_line(tmp_path, monkeypatch, bad, what, suffix):
    monkeypatch.setattr("glm5fn.sources.LONGEST_LINE", 199_999)
    path = tmp_path / f"rows{suffix}"
    with pytest.raises(ValueError) as error:
        read(path, PACKED[suffix](b"\n".join([LINES[0], b"", bad, *LINES[1:3]])))
    assert str(error.value).startswith(f"{path}:3: ")
    assert what in str(error.value)
    rest = read(path, skip_bad=True)
    assert ids(rest) == flat(text.encode() for text in TEXTS[:3])
    assert rest.notices[0].startswith(f"{path}: 1 bad rows left out: {path}:3: ") and what in rest.notices[0]


@pytest.mark.parametrize(
    ("values", "type", "what"),
    [
        (["a", "bc", None], "string", ":3: 'text' is of type NoneType, must be a string"),
        ([b"a", b"bc", b"d\xe6A"], "string", ":3: 'text' must be UTF-8 (invalid continuation byte)"),
        ([b"a", b"bc", b"d\xe6A"], "dictionary", ":3: 'text' must be UTF-8 (invalid continuation byte)"),
        ([b"a", b"bc", b"d"], "binary", ":1: 'text' is of type bytes, must be a string"),
        ([1, 2, 3], "int64", ":1: 'text' is of type int, must be a string"),
        ([["a"], ["b"], []], "list", ":1: 'text' is of type list, must be a string"),
    ],
    ids=["null", "no UTF-8", "no UTF-8 in a dictionary", "bytes", "numbers", "lists"],
)
def test_a_bad_row_of_parquet_is_refused_with_its_file_and_number(tmp_path, values, type, what):
    raw = isinstance(values[0], bytes) and type != "binary"  # as text, which is not checked when it is made of bytes
    kind = pyarrow.string() if raw else {"list": pyarrow.list_(pyarrow.string())}.get(type) or getattr(pyarrow, type)()
    column = pyarrow.array(values, pyarrow.binary()).view(kind) if raw else pyarrow.array(values, kind)
    column = column.dictionary_encode() if type == "dictionary" else column
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": column}), path)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}{what}")
    if ":3:" in what:
        assert ids(read(path, skip_bad=True)) == flat([b"a", b"bc"])


def test_the_frames_of_a_packed_file_are_read_one_after_the_other(tmp_path):
    for suffix in (".jsonl.gz", ".jsonl.zst"):
        raw = b"".join(PACKED[suffix](line + b"\n") for line in LINES)
        assert ids(read(tmp_path / f"rows{suffix}", raw)) == flat(text.encode() for text in TEXTS)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("cut", [1, 9, 40])
def test_a_packed_file_that_is_not_whole_is_refused_by_name(tmp_path, suffix, cut):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    whole = path.read_bytes() if suffix == ".parquet" else PACKED[suffix](b"\n".join(LINES))
    with pytest.raises(ValueError, match=re.escape(f"{path}: cannot be ")):
        read(path, whole[:-cut])


def test_a_row_of_50_megabytes_takes_bounded_memory(tmp_path):
    size = 50_000_000
    tracemalloc.start()
    data = read(tmp_path / "rows.jsonl", b'{"text": "' + b"word " * (size // 5) + b'"}\n' + LINES[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(ids(data)) == size + 1 + len(TEXTS[0]) + 1
    assert peak < 8 * size


def test_texts_are_taken_as_they_are_from_the_field_that_is_asked_for(tmp_path):
    rows = read(tmp_path / "rows.jsonl", b'{"body": "a\\u0000b"}\n{"text": 12, "body": "c"}', field="body")
    assert ids(rows) == flat([b"a\0b", b"c"])
    book = read(tmp_path / "book.txt", b"\xef\xbb\xbfone\r\n\n\xc3\xa9two\n")
    assert ids(book) == flat([b"one\r\n\n\xc3\xa9two\n"])


def test_without_a_path_the_help_pages_of_python_are_read():
    data = open_data(DataConfig(), MODEL, seed=0)
    tokens = flat(topics[name].encode() for name in sorted(topics))
    assert ids(data) == tokens
    assert len(data.held_out) == round(0.02 * -(-(len(tokens) - 1) // 256))


def fixed(tokens, targets, **more):
    return save({"tokens": np.asarray(tokens), "targets": np.asarray(targets), **more})


ONES = np.ones((3, 4), np.int64)
NONE = np.full((3, 4), IGNORE)
SPOILT = {id: [[1] * 4, [1] * 4, [1, id, 1, 1]] for id in (293, 300, IGNORE, -1)}


@pytest.mark.parametrize(
    ("name", "raw", "what"),
    [
        ("none.txt", None, ": is not there: data.path must be a file"),
        (".", None, ": is a directory without token shards: data.path must be a file"),
        ("empty.jsonl", b"", ": is empty"),
        ("text.csv", b"a,b", ": data.path must end in one of .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .txt, .saf"),
        ("book.txt", b"one\ntwo\xff", ":2: must be UTF-8 text"),
        ("blank.jsonl", b" \n\n", ": has 0 tokens, must have at least data.seq-len (4) + 1"),
        ("short.txt", b"abc", ": has 4 tokens, must have at least data.seq-len (4) + 1"),
        ("broken.safetensors", b"not safetensors at all", ": must be a safetensors file of fixed batches"),
        ("bare.safetensors", fixed(ONES, NONE), ": no sample has a label: all targets of its 3 samples are -100"),
        ("no.safetensors", fixed(ONES[:0], NONE[:0]), ": no sample has a label: all targets of its 0 samples are"),
        ("length.safetensors", fixed(ONES[:, :3], ONES[:, :3]), ": samples have 3 tokens, data.seq-len is 4: must be"),
        ("half.safetensors", save({"tokens": ONES}), ": has tokens int64 [3, 4], must have tokens and targets"),
        ("more.safetensors", fixed(ONES, ONES, segments=ONES), ": has segments int64 [3, 4], targets int64 [3, 4], t"),
        ("shapes.safetensors", fixed(ONES, ONES[:2]), ": has targets int64 [2, 4], tokens int64 [3, 4], must have"),
        ("float.safetensors", fixed(ONES, ONES / 1), ": has targets float64 [3, 4], tokens int64 [3, 4], must have"),
        ("bool.safetensors", fixed(ONES > 0, ONES), ": has targets int64 [3, 4], tokens bool [3, 4], must have"),
        ("flat.safetensors", fixed(ONES[0], ONES[0]), ": has targets int64 [4], tokens int64 [4], must have"),
        ("a.safetensors", fixed(SPOILT[293], ONES), ": tokens[2, 1] is 293, must be below the model's vocab_size (293"),
        ("b.safetensors", fixed(ONES, SPOILT[300]), ": targets[2, 1] is 300, must be below the model's vocab_size"),
        ("c.safetensors", fixed(SPOILT[IGNORE], ONES), ": tokens[2, 1] is -100, must be below the model's vocab_size"),
        ("d.safetensors", fixed(ONES, SPOILT[-1]), ": targets[2, 1] is -1, must be below the model's vocab_size"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[-12:] else "",
)
def test_a_file_that_cannot_be_trained_on_is_refused_by_name(tmp_path, name, raw, what):
    with pytest.raises(ValueError) as error:
        read(tmp_path / name, raw)
    assert str(error.value).startswith(f"{tmp_path / name}{what}")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level tokenizer.json that asks for all that a text must not get."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"special_tokens": ["<|end|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=290, show_progress=False, **settings)
    tokenizer.train_from_iterator(["the quick brown fox and the lazy dog and the hen"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_a_tokenizer_json_encodes_texts_as_text_and_the_models_first_eos_ends_them(tmp_path, bpe):
    texts = ["the fox and the hen", "\0\u4e16", "dog<|end|>hen"]
    data = read(tmp_path / "rows.jsonl", "\n".join(json.dumps({"text": t}) for t in texts).encode(), tokenizer=bpe)
    library = Tokenizer.from_file(bpe)
    documents = [open_tokenizer(bpe, 7).encode([text])[0].tolist() for text in texts]
    assert ids(data) == flat(documents, end=7)
    assert [library.decode(ids, skip_special_tokens=False) for ids in documents] == texts
    assert all(library.token_to_id("<|end|>") not in ids for ids in documents)


@pytest.mark.parametrize("text", ["the fox " * 20_000, "x" * 150_000, "the\nhen  and " * 10_000], ids=lambda t: t[:3])
def test_a_long_text_is_encoded_in_pieces_that_lose_nothing(bpe, text):
    tokenizer, lengths = open_tokenizer(bpe, 7), []
    counted = replace(tokenizer, encode=lambda texts: lengths.extend(map(len, texts)) or tokenizer.encode(texts))
    tokens = encode(["", "hen", text, ""], counted, np.dtype(np.uint16))[0].tolist()
    assert tokens == flat(tokenizer.encode(["hen", text]), end=7)
    assert (sum(lengths), max(lengths) <= 65536) == (len("hen" + text), True)
    assert encode([text], BYTES, np.dtype(np.uint16))[0].tolist() == flat([text.encode()])


UNIGRAM = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((char, -3.0) for char in "ab/<>s\u2581")]


def test_a_vocabulary_that_has_control_tokens_as_text_gives_text(tmp_path):
    own = Tokenizer(models.Unigram(UNIGRAM, 0, False))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.add_special_tokens(["<s>", "</s>"])
    own.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(str(tmp_path / "tokenizer.json"), "</s>")
    assert found.end == 2 and not {1, 2} & {*found.encode(["a</s>b<s>"])[0].tolist()}


def test_a_tokenizer_that_puts_a_space_first_gets_long_texts_whole(tmp_path):
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=["<E>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    own.train_from_iterator([], trainer)
    own.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(str(tmp_path / "tokenizer.json"), "<E>")
    text = "\u4e2d" * 70_000 + "\u6587" * 70_000
    ids, _ = encode([text], found, np.dtype(np.uint16))
    assert not found.joins and found.decode(ids[:-1]) == " " + text
    with pytest.raises(ValueError, match=r"book\.txt: this tokenizer begins each part of a text with a space"):
        read(tmp_path / "book.txt", b"a " * (1 << 20), tokenizer=str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("raw", [b"", b"\xef\xbb\xbf"])
def test_a_text_without_text_is_no_document(tmp_path, raw):
    (tmp_path / "a.txt").write_bytes(raw)
    found = [block for block in text_blocks(tmp_path / "a.txt")]
    assert found == []
    with pytest.raises(ValueError, match=r"a\.txt:1: must be UTF-8 text"):
        list(text_blocks_of(tmp_path, b"\xef\xbb"))


def text_blocks_of(directory, raw):
    (directory / "a.txt").write_bytes(raw)
    return text_blocks(directory / "a.txt")


def test_a_document_of_which_the_tokenizer_keeps_nothing_is_skipped():
    stripped = replace(BYTES, encode=lambda texts: BYTES.encode([text.strip() for text in texts]))
    assert encode(["b", "  ", "a b"], stripped, np.dtype(np.uint16))[0].tolist() == flat([b"b", b"a b"])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "is not there: a tokenizer must be 'bytes'"),
        ('{"version": "1.0"', r"must be a tokenizer\.json \("),
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="?")).to_str(), "must be able to encode any text"),
        (Tokenizer(models.WordLevel({"a": 300}, unk_token="a")).to_str(), r"has 301 tokens, so vocab_size \(293\)"),
    ],
    ids=["missing", "broken", "no unknown token", "too long"],
)
def test_a_tokenizer_file_that_cannot_be_used_is_refused_by_name(tmp_path, content, what):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json:? {what}"):
        read(tmp_path / "book.txt", b"b", tokenizer=str(tmp_path / "tokenizer.json"))


def test_a_model_must_have_an_id_for_each_byte_and_for_the_end_of_a_document(bpe):
    with pytest.raises(ValueError, match=r"bytes has 257 tokens, so vocab_size \(256\) must be at least 257"):
        open_data(DataConfig(), replace(MODEL, vocab_size=256), seed=0)
    with pytest.raises(ValueError, match=r"json: nothing ends a document: .* must have eos_token_id"):
        tokenizer_for(DataConfig(tokenizer=bpe), replace(MODEL, eos_token_id=()))
    with pytest.raises(ValueError, match=r"eos_token_id \(293\) ends .* must be from 0 to vocab_size \(293\) - 1"):
        tokenizer_for(DataConfig(tokenizer=bpe), replace(MODEL, eos_token_id=(293, 7)))


@pytest.mark.parametrize("size", [2, 5, 6, 7, 11, 12, 41])
@pytest.mark.parametrize("seq_len", [1, 5])
def test_every_token_but_the_first_is_a_target_once(size, seq_len):
    tokens = np.arange(100, 100 + size, dtype=np.uint16)
    windows = Windows(corpus(tokens), seq_len)
    cut = [windows[i] for i in range(len(windows))]
    assert {(x.shape, x.dtype.name) for window in cut for x in window.values()} == {((seq_len,), "int64")}
    inputs, targets = (np.concatenate([window[name] for window in cut]) for name in ("tokens", "targets"))
    assert targets[: size - 1].tolist() == tokens[1:].tolist()
    assert inputs[: size - 1].tolist() == tokens[:-1].tolist()
    assert set(targets[size - 1 :]) <= {IGNORE}
    assert set(inputs[size:]) <= {0}


def test_an_array_of_indices_gives_a_batch_and_no_index_goes_beyond_the_last_window():
    data = Windows(corpus(np.arange(33)), 5)
    batch = data[np.array([6, 0, 3])]
    assert all(np.array_equal(batch[name], np.stack([data[i][name] for i in (6, 0, 3)])) for name in batch)
    with pytest.raises(IndexError):
        data[np.array([0, 7])]


@pytest.mark.parametrize(("held_out", "count"), [(0.0, 0), (0.001, 1), (0.3, 3), (0.99, 9)])
def test_the_last_windows_are_held_out_and_both_parts_hold_every_target(tmp_path, held_out, count):
    text = bytes(range(65, 114))
    data = read(tmp_path / "book.txt", text, seq_len=5, held_out=held_out)
    assert (len(data.train[0]), len(data.held_out), data.notices) == (10 - count, count, ())
    targets = [
        id
        for part in (*data.train, data.held_out)
        if len(part)
        for id in everything(part)["targets"].flatten().tolist()
    ]
    assert [id for id in targets if id != IGNORE] == flat([text])[1:]
    single = read(tmp_path / "book.txt", seq_len=49, held_out=held_out)
    assert (len(single.train[0]), len(single.held_out), len(single.notices)) == (1, 0, held_out > 0)


def test_each_epoch_has_its_own_order_that_the_seed_and_the_number_alone_decide():
    straight = numbered(7).places(np.arange(4 * 7))[1].tolist()
    epochs = [straight[at : at + 7] for at in range(0, 4 * 7, 7)]
    assert all(sorted(epoch) == list(range(7)) and epochs.count(epoch) == 1 for epoch in epochs)
    assert [numbered(7).places(np.array([g]))[1].item() for g in reversed(range(4 * 7))] == straight[::-1]
    assert numbered(7, seed=4).places(np.arange(4 * 7))[1].tolist() != straight
    assert epochs[0] == [0, 4, 1, 5, 6, 3, 2]  # or saved runs would go on in another order


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 8, 16])
def test_the_ranks_share_out_the_global_batch(ranks, start):
    data, cfg = numbered(11), DataConfig(seq_len=5, global_batch=8, micro_batch=2)
    batches = [batch for rank in range(ranks) for batch in micro_batches(data, cfg, rank, ranks, start)]
    assert {(x.shape, x.dtype) for batch in batches for x in batch.values()} == {((2, 5), torch.int64)}
    assert rows(batches) == rows([data.train[0][data.places(np.arange(start, start + 8))[1]]])


def test_a_run_that_stops_and_goes_on_sees_what_one_that_does_not_stop_sees():
    cfg = DataConfig(seq_len=5, global_batch=4, micro_batch=2)
    straight = [rows(micro_batches(data, cfg, 1, 2, 4 * step)) for data in [numbered(7)] for step in range(10)]
    resumed = [rows(micro_batches(numbered(7), cfg, 1, 2, 4 * step)) for step in (7, 8, 9, 0, 1, 2, 3, 4, 5, 6)]
    assert resumed == straight[7:] + straight[:7]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 7, 12])
def test_every_held_out_window_is_counted_once_and_the_ranks_stay_in_step(ranks, count):
    data, cfg = numbered(3, held_out=count), DataConfig(seq_len=5, micro_batch=2)
    parts = [list(held_out_batches(data, cfg, rank, ranks)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {-(-count // (2 * ranks))}
    batches = [batch for part in parts for batch in part]
    assert all(x.shape == (2, 5) and x.dtype == torch.int64 for batch in batches for x in batch.values())
    labels = sorted(id for _, targets in rows(batches) for id in targets if id != IGNORE)
    assert labels == list(range(3 * 5 + 1, (3 + count) * 5 - 1))
    blank = [row for row in rows(batches) if set(row[1]) == {IGNORE}]
    assert blank == [([0] * 5, [IGNORE] * 5)] * (len(batches) * 2 - count)


@pytest.mark.parametrize(("count", "told"), [(9, True), (8, False)])
def test_a_step_that_finds_too_few_samples_is_told(tmp_path, count, told):
    """The text gives eight windows."""
    data = read(tmp_path / "book.txt", b"x" * 32, global_batch=count)
    said = "8 samples are fewer than data.global-batch (9): each step reads some of them more than once"
    assert data.notices == ((said,) if told else ())


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64])
def test_fixed_batches_are_replayed_in_file_order_and_samples_without_a_label_counted(tmp_path, dtype):
    tokens, cfg = np.arange(12, dtype=dtype).reshape(3, 4), DataConfig(seq_len=4, global_batch=2)
    targets = np.array([[IGNORE] * 4, [5, 6, IGNORE, 8], [9, 10, 11, 12]])
    data = read(tmp_path / "fixed.safetensors", fixed(tokens, targets), held_out=0.5)
    assert data.notices == (f"{tmp_path / 'fixed.safetensors'}: 1 of 3 samples have no label",)
    got = rows(batch for step in range(3) for batch in micro_batches(data, cfg, 0, 1, 2 * step))
    assert got == [(tokens[g % 3].tolist(), targets[g % 3].tolist()) for g in range(6)]
    assert list(held_out_batches(data, cfg, 0, 1)) == []
