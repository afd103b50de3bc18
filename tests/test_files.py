import json
import os
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from glm5fn.files import INDEX, MODEL, TensorFiles, contract
from glm5fn.writer import write_tensors

TENSORS = {
    "flag": torch.tensor([True, False, True]),  # three bytes, so that what follows is not aligned
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.randn(3, 5).half(),
    "brain": torch.randn(7, 2, 3).bfloat16(),
    "empty": torch.empty(0, 4),
    "single": torch.randn(11, 6),
    "eight": torch.randn(5, 3).to(torch.float8_e4m3fn),
    "byte": torch.arange(13, dtype=torch.uint8),
    "int": torch.arange(-3, 4, dtype=torch.int32),
    "long": torch.tensor([[2**40, -1]]),
}
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def rows_of(tensors):
    return [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()]


def write(path, tensors, metadata=None):
    write_tensors(path, rows_of(tensors), tensors.values(), metadata or {"format": "pt"})


def same(a, b):
    as_bytes = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


@pytest.fixture
def sharded(tmp_path):
    """Three shards of two tensors each, as safetensors itself writes them."""
    directory = tmp_path / "sharded"
    directory.mkdir()
    served = {}
    for i, shard in enumerate(SHARDS):
        tensors = {f"w{2 * i}": torch.randn(30, 4), f"w{2 * i + 1}": torch.randn(5)}
        save_file(tensors, directory / shard)
        served |= dict.fromkeys(tensors, shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": served}))
    return directory


def edit_index(directory, edit):
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def edit_shard(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def refused(place):
    with pytest.raises(ValueError) as error:
        TensorFiles.open(place)
    return str(error.value)


# --- one file ---


def test_safetensors_reads_what_we_write_bit_for_bit(tmp_path):
    write(tmp_path / "a.safetensors", TENSORS, {"format": "glm5fn", "step": "7"})
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(same(read[key], TENSORS[key]) for key in TENSORS)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "glm5fn", "step": "7"}


def test_we_read_what_safetensors_writes_bit_for_bit(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors")
    files = TensorFiles.open_files(tmp_path, ["a.safetensors"])
    assert files.rows.keys() == TENSORS.keys()
    assert all(same(files.read(key), TENSORS[key]) for key in TENSORS)


def test_the_file_is_a_padded_header_and_the_tensors_in_the_order_given(tmp_path):
    write(tmp_path / "a.safetensors", TENSORS)
    content = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert list(header) == ["__metadata__", *TENSORS]
    ends = [header[key]["data_offsets"] for key in TENSORS]
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert 8 + length + ends[-1][1] == len(content)


def test_one_tensor_is_held_at_a_time(tmp_path):
    made = []

    def make():
        assert not any(reference() is not None for reference in made)
        tensor = torch.zeros(8)
        made.append(weakref.ref(tensor))
        return tensor

    rows = [(f"w{i}", torch.float32, (8,)) for i in range(5)]
    write_tensors(tmp_path / "a.safetensors", rows, (make() for _ in rows), {})
    assert len(made) == 5


def test_a_transposed_tensor_is_written_by_value(tmp_path):
    tensor = torch.randn(3, 5)
    write(tmp_path / "a.safetensors", {"w": tensor.T})
    assert same(load_file(tmp_path / "a.safetensors")["w"], tensor.T)


@pytest.mark.parametrize("came", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.bfloat16)], ids=["shape", "dtype"])
def test_a_tensor_that_is_not_what_its_row_says_is_refused_by_name(tmp_path, came):
    with pytest.raises(ValueError, match=r"layers\.0\.q came as .* must be \('float32', \(2, 3\)\)"):
        write_tensors(tmp_path / "a.safetensors", [("layers.0.q", torch.float32, (2, 3))], [came], {})


def test_too_few_or_too_many_tensors_are_refused(tmp_path):
    rows = rows_of({"a": torch.zeros(2), "b": torch.zeros(2)})
    for count in (1, 3):
        with pytest.raises(ValueError):
            write_tensors(tmp_path / "a.safetensors", rows, [torch.zeros(2)] * count, {})


def test_a_repeated_key_and_an_unknown_dtype_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="w stands twice"):
        write_tensors(tmp_path / "a.safetensors", [("w", torch.float32, (2,))] * 2, [], {})
    with pytest.raises(ValueError, match="w has dtype complex64"):
        write_tensors(tmp_path / "a.safetensors", [("w", torch.complex64, (2,))], [], {})


# --- reading regions ---


@pytest.mark.parametrize("region", [((2, 3), (0, 6)), ((0, 11), (1, 2)), ((4, 5), (3, 3)), ((11, 0), (0, 6))])
def test_a_region_equals_the_slice_of_the_whole_and_owns_its_memory(tmp_path, region):
    write(tmp_path / "a.safetensors", TENSORS)
    part = TensorFiles.open_files(tmp_path, ["a.safetensors"]).read("single", region)
    assert same(part, TENSORS["single"][tuple(slice(start, start + size) for start, size in region)])
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes


def test_a_region_outside_the_tensor_is_an_error(tmp_path):
    write(tmp_path / "a.safetensors", TENSORS)
    with pytest.raises(AssertionError, match="does not contain"):
        TensorFiles.open_files(tmp_path, ["a.safetensors"]).read("single", ((9, 3), (0, 6)))


# --- directories ---


def test_shards_are_read_through_the_index(sharded):
    files = TensorFiles.open(sharded)
    assert list(files.rows) == [f"w{i}" for i in range(6)]
    assert files.rows["w2"][:3] == (SHARDS[1], torch.float32, (30, 4))
    for shard in SHARDS:
        assert all(same(files.read(key), tensor) for key, tensor in load_file(sharded / shard).items())


def test_a_stale_shard_that_the_index_does_not_name_is_ignored(sharded):
    right = load_file(sharded / SHARDS[0])["w0"]
    save_file({"w0": torch.zeros(30, 4), "old": torch.zeros(1)}, sharded / "model-00004-of-00004.safetensors")
    save_file({"w0": torch.zeros(30, 4)}, sharded / MODEL)
    files = TensorFiles.open(sharded)
    assert same(files.read("w0"), right) and "old" not in files.rows


def test_the_index_decides_which_of_two_files_serves_a_key(sharded):
    right = load_file(sharded / SHARDS[0])["w0"]
    edit_shard(sharded / SHARDS[2], lambda tensors: tensors.update(w0=torch.zeros(7)))
    assert same(TensorFiles.open(sharded).read("w0"), right)


def test_a_missing_shard_is_named_with_all_its_tensors(sharded):
    (sharded / SHARDS[1]).unlink()
    message = refused(sharded)
    assert f"{SHARDS[1]} is missing" in message and "w2, w3" in message


def test_a_truncated_shard_is_named_with_the_tensors_it_lost(sharded):
    path = sharded / SHARDS[2]
    os.truncate(path, path.stat().st_size - 100)
    message = refused(sharded)
    assert f"{SHARDS[2]} is truncated" in message and "w4" in message


def test_a_shard_that_grew_is_named(sharded):
    with (sharded / SHARDS[0]).open("ab") as file:
        file.write(b"12345")
    assert SHARDS[0] in refused(sharded)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        b"version https://git-lfs.github.com/spec/v1",
        b"\x02" + bytes(7) + b"[]",
        b"\x03" + bytes(7) + b"{x}",
    ],
)
def test_a_file_that_is_not_safetensors_is_named_with_its_tensors(sharded, content):
    (sharded / SHARDS[1]).write_bytes(content)
    message = refused(sharded)
    assert f"{SHARDS[1]} cannot be read" in message and "w2, w3" in message


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},  # bytes that are not its size
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},  # a gap
        {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        {"dtype": "F32", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        "F32",
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, entry):
    text = json.dumps({"w": entry}).encode()
    (tmp_path / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    assert MODEL in refused(tmp_path)


def test_a_key_that_stands_twice_in_one_header_or_index_is_refused_by_name(sharded):
    text = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (sharded / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"1")
    with pytest.raises(ValueError, match=r"x\.safetensors cannot be read as safetensors \(repeated keys: w\)"):
        TensorFiles.open_files(sharded, ["x.safetensors"])
    (sharded / INDEX).write_text(f'{{"weight_map": {{"w0": "{SHARDS[0]}", "w0": "{SHARDS[1]}"}}}}')
    assert "repeated keys: w0" in refused(sharded)


def test_keys_that_index_and_shard_do_not_agree_on_are_named(sharded):
    edit_index(sharded, lambda served: (served.pop("w5"), served.update(ghost=SHARDS[0])))
    message = refused(sharded)
    assert f"{SHARDS[2]} has tensors that {INDEX} does not list: w5" in message
    assert f"{SHARDS[0]} lacks tensors that {INDEX} lists: ghost" in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": [1]}}'])
def test_a_broken_index_is_refused_by_name(sharded, text):
    (sharded / INDEX).write_text(text)
    assert f"{INDEX} cannot be read" in refused(sharded)


def test_a_directory_without_a_model_says_what_is_looked_for(tmp_path):
    message = refused(tmp_path)
    assert str(tmp_path) in message and MODEL in message and INDEX in message


def test_all_defects_are_named_at_once(sharded):
    (sharded / SHARDS[0]).unlink()
    os.truncate(sharded / SHARDS[1], 100)
    shapes = {f"w{i}": (31, 4) if i % 2 == 0 else (5,) for i in range(5)} | {"absent": (1,), "gone": (2,)}
    with pytest.raises(ValueError) as error:
        TensorFiles.open(sharded, lambda rows: contract(rows, shapes))
    message = str(error.value)
    assert f"{SHARDS[0]} is missing" in message and SHARDS[1] in message
    assert "missing: absent, gone" in message
    assert f"unexpected: w5 in {SHARDS[2]}" in message
    assert f"w4 in {SHARDS[2]} has shape (30, 4), must be (31, 4)" in message
