"""Files of rows as people have them: the ways that one may be written, and lines that are no row."""

import gzip

import pyarrow

WAYS = {
    "plain": lambda lines: b"\n".join(lines) + b"\n",
    "BOM": lambda lines: b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n",
    "CRLF": lambda lines: b"\r\n".join(lines) + b"\r\n",
    "blank lines": lambda lines: b"\n \t\n".join([b"", *lines, b"", b""]),
    "no last line end": b"\n".join,
}

NO_OBJECTS = [
    (b'{"text": "abc', "must be one JSON object in UTF-8 (column 10: Unterminated string"),
    (b'{"text": "abc\xe6\x41"}', "invalid continuation byte"),
    (b'["text"]', "is a JSON list, must be an object"),
    (b'"text"', "is a JSON str, must be an object"),
    (b"NaN", "is a JSON float, must be an object"),
    (b'{"text": "a"} {"text": "b"}', "must be one JSON object in UTF-8 (column 15: Extra data)"),
    (b'{"text": "a"}\r{"text": "b"}', "must be one JSON object"),
    (b'{"text": ' + b"[" * 100_000, "must be one JSON object"),
    (b'{"text": "' + b"a" * 200_000 + b'"}', "the line is longer than 199999 bytes: must be cut in several rows"),
]


def compress_zst(raw):
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(raw)
    return packed.getvalue().to_pybytes()


PACKED = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": compress_zst}
