"""Conversations: what is learned of them, what their text can and cannot do, and where they are cut."""

import json
from pathlib import Path

import numpy as np
import pytest
from lines import NO_OBJECTS, PACKED, WAYS
from tiny import PLAIN, tiny
from training import train
from transformers import PreTrainedTokenizerFast

from glm5fn.__main__ import main
from glm5fn.chat import encode_chat, open_template
from glm5fn.corpora import open_data
from glm5fn.kernels.reference import IGNORE
from glm5fn.record import read_metrics
from glm5fn.settings import DataConfig
from glm5fn.text import open_tokenizer

CHAT = Path(__file__).parent.parent / "examples" / "chat"
TOKENIZER = open_tokenizer(str(CHAT), None)
RENDER = open_template(str(CHAT), None)
ID = TOKENIZER.control
ENDS = [ID[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
MODEL = tiny(**PLAIN, vocab_size=288, max_position_embeddings=512, eos_token_id=tuple(ENDS))


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def calls(**arguments):
    return [{"type": "function", "function": {"name": "look", "arguments": arguments}}]


def encode(*messages, longest=10_000, control=False, **row):
    return encode_chat({"messages": list(messages), **row}, TOKENIZER, RENDER, ENDS, longest, control)


def read(text):
    """The ids of a text in which control tokens are."""
    found, at = [], 0
    while at < len(text):
        name = next((name for name in ID if text.startswith(name, at)), None)
        found += [ID[name]] if name else text[at].encode()
        at += len(name or text[at])
    return found


def expected(*parts):
    """(ids, learned) of texts, of which those in lists are learned."""
    pairs = [(id, isinstance(part, list)) for part in parts for id in read(part[0] if isinstance(part, list) else part)]
    return [id for id, _ in pairs], [learned for _, learned in pairs]


def found(*messages, **how):
    conversation = encode(*messages, **how)
    return conversation.ids.tolist(), conversation.learned.tolist()


BEGIN = "[gMASK]<sop>"
CASES = {
    "one turn": (
        [user("a"), assistant("b")],
        [BEGIN + "<|user|>\na<|assistant|>", ["<think></think>b<|user|>"]],
    ),
    "several turns, the last question without an answer": (
        [system("s"), user("a"), assistant("b"), user("c"), assistant("\u4e16"), user("e")],
        [
            BEGIN + "<|system|>\ns<|user|>\na<|assistant|>",
            ["<think></think>b<|user|>"],
            "\nc<|assistant|>",
            ["<think></think>\u4e16<|user|>"],
            "\ne",
        ],
    ),
    "thinking, kept behind the last question alone": (
        [user("a"), assistant("b", reasoning_content="r"), user("c"), assistant("d", reasoning_content="q")],
        [
            BEGIN + "<|user|>\na<|assistant|>",
            ["<think></think>b<|user|>"],
            "\nc<|assistant|>",
            ["<think>q</think>d<|user|>"],
        ],
    ),
    "a tool": (
        [user("a"), assistant("", tool_calls=calls(x="1", n=2)), tool("t"), tool("u"), assistant("b")],
        [
            BEGIN + "<|user|>\na<|assistant|>",
            [
                "<think></think><tool_call>look<arg_key>x</arg_key><arg_value>1</arg_value>"
                "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call><|observation|>"
            ],
            "<tool_response>t</tool_response><tool_response>u</tool_response><|assistant|>",
            ["<think></think>b<|user|>"],
        ],
    ),
    "a call at the end": (
        [user("a"), assistant("b", tool_calls=calls())],
        [
            BEGIN + "<|user|>\na<|assistant|>",
            ["<think></think>b<tool_call>look</tool_call><|observation|>"],
        ],
    ),
    "an empty answer": (
        [user("a"), assistant(""), user("b"), assistant("")],
        [
            BEGIN + "<|user|>\na<|assistant|>",
            ["<think></think><|user|>"],
            "\nb<|assistant|>",
            ["<think></think><|user|>"],
        ],
    ),
    "answers in a row, and a system's word behind one": (
        [user("a"), assistant("b"), assistant("c"), system("s"), user("d"), assistant("e")],
        [
            BEGIN + "<|user|>\na<|assistant|>",
            ["<think></think>b"],
            "<|assistant|>",
            ["<think></think>c"],
            "<|system|>\ns<|user|>\nd<|assistant|>",
            ["<think></think>e<|user|>"],
        ],
    ),
    "system only": ([system("s")], []),
    "no answer": ([system("s"), user("a")], []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_assistant_says_and_the_token_that_ends_it_are_learned(name):
    messages, parts = CASES[name]
    assert found(*messages) == expected(*parts)


def test_parts_of_a_message_are_its_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert found(user(parts), assistant("c")) == found(user("ab"), assistant("c"))


def test_arguments_of_a_call_may_be_the_text_of_their_json():
    call = {"type": "function", "function": {"name": "look", "arguments": json.dumps({"x": "1", "n": 2})}}
    told = found(user("a"), assistant("", tool_calls=[call]))
    assert told == found(user("a"), assistant("", tool_calls=[call["function"]]))
    assert told == found(user("a"), assistant("", tool_calls=calls(x="1", n=2)))


TURNS = [user("a"), assistant("b", reasoning_content="r" * 9), user("c" * 20), assistant("d"), user("e" * 30)]


def test_the_last_turns_are_left_out_until_the_rest_fits():
    one, two, whole = (len(found(*TURNS[:n])[0]) for n in (2, 4, 5))
    assert one < two < whole
    for longest in range(one - 4, whole + 2):
        kept = 5 if longest >= whole - 1 else 4 if longest >= two - 1 else 2 if longest >= one - 1 else 0
        assert found(*TURNS, longest=longest) == (found(*TURNS[:kept]) if kept else ([], [])), longest
    assert b"rrr" not in bytes(id for id in found(*TURNS)[0] if id < 256)
    assert b"rrr" in bytes(id for id in found(*TURNS, longest=one)[0] if id < 256)  # it is the last question then


TYPED = [
    *ID,
    "<|us",
    "er|>",
    "[gMASK",
    "]<sop>",
    "<<|user|>>",
    "\ue000<|user|>\ue001",
    "<|user|>" * 3,
    "<\ue000|user|>",
]


@pytest.mark.parametrize("typed", TYPED)
def test_what_is_typed_is_text_wherever_it_stands(typed):
    arguments = {typed: typed, "x": [typed, {"y": typed}]}
    row = {"tools": [{"type": "function", "function": {"name": typed, "description": typed}}]}
    parts = [{"type": "text", "text": typed}, {"type": "text", "text": "er|>"}]
    messages = [system(typed), user(parts), assistant(typed, reasoning_content=typed, tool_calls=calls(**arguments))]
    plain = "z" * len(typed)
    ids, learned = found(*messages, **row)
    wanted = json.loads(json.dumps([messages, row]).replace(json.dumps(typed)[1:-1], plain))
    others, expected_learned = found(*wanted[0], **wanted[1])
    assert [id for id in ids if id > 255] == [id for id in others if id > 255]
    assert sum(learned) - sum(expected_learned) == 6 * (len(typed.encode()) - len(plain)) + added(typed)
    text = RENDER(messages, row["tools"])
    assert TOKENIZER.decode(ids) == text + "<|observation|>"
    assert ids.count(ID["[gMASK]"]) == ids.count(ID["<sop>"]) == 1


def added(typed):
    """What JSON adds to the argument that is not a plain string, in which it stands twice."""
    return 2 * (len(json.dumps(typed, ensure_ascii=False)) - 2 - len(typed))


def test_texts_that_a_template_joins_make_no_control_token(tmp_path):
    joined = "{% for m in messages %}{{ m.content }}{% endfor %}<{{ messages[0].content }}<|assistant|>x"
    (tmp_path / "t.jinja").write_text(joined)
    render = open_template(str(CHAT), str(tmp_path / "t.jinja"))
    for parts in (["|user|>", "<"], ["<|us", "er|>"], ["think>", "</"], ["sop>", "<"]):
        row = {"messages": [user(parts[0]), user(parts[1]), user(parts[0]), assistant("")]}
        ids = encode_chat(row, TOKENIZER, render, ENDS, 999, False).ids.tolist()
        assert [id for id in ids if id > 255] == [ID["<|assistant|>"], ID["<|user|>"]]
        assert TOKENIZER.decode(ids) == render(row["messages"], None) + "<|user|>"


def test_a_template_may_escape_what_is_typed_and_mark_what_is_learned(tmp_path):
    text = "{% for m in messages %}{% generation %}<|assistant|>{{ m.content | tojson(ensure_ascii=True) }}"
    (tmp_path / "t.jinja").write_text(text + "{% endgeneration %}{% endfor %}")
    render = open_template(str(CHAT), str(tmp_path / "t.jinja"))
    row = {"messages": [assistant("<|user|>\ue000\u4e16")]}
    ids = encode_chat(row, TOKENIZER, render, ENDS, 999, False).ids.tolist()
    assert ids == [*read("<|assistant|>"), *b'"<|user|>\\ue000\\u4e16"', *read("<|user|>")]


def test_control_tokens_are_made_on_request():
    parts = [BEGIN + "<|user|>\na<sop><|assistant|>", ["<think></think><think>r</think>b<|user|>"]]
    assert found(user("a<sop>"), assistant("<think>r</think>b"), control=True) == expected(*parts)


def test_a_padding_token_that_is_an_end_changes_nothing(tmp_path):
    """Padding stands in no row: where a window is not filled there is no segment and no label."""
    data = open_chat(tmp_path, [[user("a"), assistant("b")]], seq_len=64)
    rows = data.train[0][np.array([0])]
    size = len(found(user("a"), assistant("b"))[0]) - 1
    assert rows["segments"][0].tolist() == [1] * size + [0] * (64 - size)
    assert set(rows["targets"][0][size:]) == {IGNORE}
    labels = [id for id in rows["targets"][0].tolist() if id != IGNORE]
    assert labels == read("<think></think>b<|user|>")


def open_chat(tmp_path, conversations, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    cfg = DataConfig(
        path=(str(path),),
        kind="chat",
        tokenizer=str(CHAT),
        **({"held_out": 0.0, "seq_len": 64, "global_batch": 1} | settings),
    )
    return open_data(cfg, MODEL, seed=0)


def test_rows_in_which_control_tokens_are_typed_are_told(tmp_path):
    typed = [user("a"), assistant("<think>r</think>b")]
    said = "rows.jsonl: what reads like control tokens in 1 rows are taken as text, by the template too"
    assert said in open_chat(tmp_path, [typed, [user("a"), assistant("b")]]).notices[0]
    assert not open_chat(tmp_path, [typed], control_tokens=True).notices


def test_rows_without_a_label_are_left_out_and_counted(tmp_path):
    good = [user("a"), assistant("b")]
    data = open_chat(tmp_path, [good, [user("q" * 300), assistant("short")], [system("s")], good])
    assert data.notices == (f"{tmp_path / 'rows.jsonl'}: 2 of 4 rows have no label, and were left out",)
    alone = open_chat(tmp_path, [good, good])
    one, other = (part.train[0][np.arange(len(part.train[0]))] for part in (data, alone))
    assert all(np.array_equal(part, other[name]) for name, part in one.items())
    with pytest.raises(ValueError, match=r"rows.jsonl: no row has a label: none of its 1 has an answer that fits"):
        open_chat(tmp_path, [[user("q" * 300), assistant("short")]])


DEEP = json.loads("[" * 700 + "]" * 700)


def call(arguments):
    return {"function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "'messages' must be a list of at least one message"),
        ({"messages": []}, "'messages' must be a list of at least one message"),
        ({"messages": "a"}, "'messages' must be a list of at least one message"),
        ({"messages": [user("a"), "b"]}, "message 2 must be an object with a role"),
        ({"messages": [{"content": "a"}]}, "message 1 must be an object with a role"),
        ({"messages": [user("\ud800"), assistant("b")]}, "has half a surrogate pair"),
        (
            {"messages": [user("a"), assistant("b"), {"role": "judge", "content": ""}]},
            "role judge must be system, user, assistant or",
        ),
        ({"messages": [user("a"), assistant("b", tool_calls=[3])]}, "the chat template cannot render it"),
        ({"messages": [user("a"), assistant("b", tool_calls={})]}, "message 2's tool_calls are of type dict"),
        ({"messages": [{"role": "user", "value": "a"}, assistant("b")]}, "message 1 has no content, has role, value"),
        ({"messages": [user(["a"]), assistant("b")]}, "message 1 has a part that is no text: a"),
        ({"messages": [user([{"type": "image"}]), assistant("b")]}, "message 1 has a part that is no text"),
        ({"messages": [user("a"), assistant("b")], "tools": DEEP}, "it is nested too deeply"),
        ({"messages": [user("a"), assistant("b", tool_calls=[call('{"x": "\\ud800"}')])]}, "half a surrogate pair"),
        ({"messages": [user(7), assistant("b")]}, "message 1's content is of type int, must be a text or parts"),
        ({"messages": [user("a"), assistant("b")], "tools": "look"}, "'tools' is of type str, must be a list"),
        (
            {"messages": [user("a"), assistant("b", tool_calls=[{"function": {"name": "f", "arguments": "{x"}}])]},
            "the arguments of a call must be an object, or JSON of one",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(row, said, tmp_path):
    with pytest.raises((ValueError, RecursionError), match=None if row.get("tools") is DEEP else said):
        encode_chat(row, TOKENIZER, RENDER, ENDS, 99, False)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row))
    cfg = DataConfig(path=(str(path),), kind="chat", tokenizer=str(CHAT))
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{said}"):
        open_data(cfg, MODEL, seed=0)


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('no') }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
]


CONVERSATIONS = [{"messages": [user("q" * n), assistant("\u2028 \u0085\r\n" + "a" * n)]} for n in range(1, 5)]


def read_rows(path, raw, **settings):
    path.write_bytes(raw)
    cfg = DataConfig(
        path=(str(path),), kind="chat", tokenizer=str(CHAT), seq_len=64, held_out=0.0, global_batch=1, **settings
    )
    return open_data(cfg, MODEL, seed=0)


def corpus_of(data):
    return data.train[0].sets[0].whole.corpus.tokens.tolist()


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("way", WAYS)
def test_however_the_lines_are_written_the_conversations_are_the_same(tmp_path, way, suffix):
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in CONVERSATIONS]
    data = read_rows(tmp_path / f"rows{suffix}", PACKED[suffix](WAYS[way](lines)))
    assert corpus_of(data) == [id for row in CONVERSATIONS for id in found(*row["messages"])[0]]


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize(("bad", "what"), NO_OBJECTS, ids=lambda value: str(value)[:40])
def test_a_line_that_is_no_row_is_refused_with_its_file_and_number(tmp_path, monkeypatch, bad, what, suffix):
    monkeypatch.setattr("glm5fn.sources.LONGEST_LINE", 199_999)
    lines = [json.dumps(row).encode() for row in CONVERSATIONS]
    path, raw = tmp_path / f"rows{suffix}", PACKED[suffix](b"\n".join([lines[0], b"", bad, *lines[1:]]))
    with pytest.raises(ValueError) as error:
        read_rows(path, raw)
    assert str(error.value).startswith(f"{path}:3: ") and what in str(error.value)
    rest = read_rows(path, raw, skip_bad=True)
    assert corpus_of(rest) == [id for row in CONVERSATIONS for id in found(*row["messages"])[0]]
    assert rest.notices[0].startswith(f"{path}: 1 bad rows left out: {path}:3: ")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_template_can_do_no_harm(text, tmp_path):
    (tmp_path / "t.jinja").write_text("[gMASK]<|assistant|>" + text)
    render = open_template(str(CHAT), str(tmp_path / "t.jinja"))
    with pytest.raises(ValueError, match="the chat template cannot render it"):
        encode_chat({"messages": [user("a"), assistant("b")]}, TOKENIZER, render, ENDS, 99, False)


def test_a_template_is_found_beside_the_tokenizer_or_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer_config.json: has no chat template: name a Jinja file"):
        open_template(str(tmp_path), None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ eos_token }}", "eos_token": "E"}))
    assert open_template(str(tmp_path), None)([], None) == "E"
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_template(str(tmp_path / "tokenizer.json"), None)([], None) == "d"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match=r"chat_template.jinja: must be a Jinja template"):
        open_template(str(tmp_path), None)


def test_every_row_of_the_example_is_written_as_by_transformers_and_has_labels():
    own = PreTrainedTokenizerFast(tokenizer_file=str(CHAT / "tokenizer.json"))
    own.chat_template = (CHAT / "chat_template.jinja").read_text()
    lines = (CHAT / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 50
    for line in lines:
        row = json.loads(line)
        ids, learned = found(*row["messages"], tools=row.get("tools"))
        rendered = own.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        assert own.decode(ids[:-1]) == rendered and any(learned)
        assert own.encode(rendered, add_special_tokens=False) == ids[:-1]
    assert sum(any("\u4e00" <= char <= "\u9fff" for char in line) for line in lines) > 20


def test_a_run_on_the_example_learns_what_the_assistant_says(tmp_path):
    sizes = ["--model.hidden-size", "24", "--model.num-hidden-layers", "2", "--model.index-topk", "8"]
    assert train("--config", "sft-tiny", *sizes, "--steps", "3", "--out", tmp_path / "run") == 0
    records = read_metrics(tmp_path / "run")
    assert len(records) == 3 and all(np.isfinite(record["loss"]) for record in records)


def test_windows_are_shown_with_what_is_learned_between_brackets(tmp_path, capsys):
    argv = ["inspect-data", str(CHAT / "chat.jsonl"), "--kind", "chat", "--tokenizer", str(CHAT), "--seq-len", "200"]
    assert main([*argv, "--count", "40"]) == 0
    said = capsys.readouterr().out
    assert "⟦<think></think>Paris.<|user|>⟧" in said and "What is the capital of France?<|assistant|>⟦" in said
    assert "⟦<think></think>巴黎。<|user|>⟧" in said and "windows of 200 tokens" in said
    (tmp_path / "a.txt").write_text("one text")
    assert main(["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert (
        main(["inspect-data", str(tmp_path / "out"), "--seq-len", "12", "--packing", "best-fit", "--count", "1"]) == 0
    )
    assert "window 0: 1 documents, 8 labels, 4 of padding\n[1] o⟦ne text<end>⟧" in capsys.readouterr().out
