import os
import shutil
import signal
from pathlib import Path

import pytest

from glm5fn.directory import atomic_directory


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def fill(directory, text):
    (directory / "a.safetensors").write_text(text)


def killed(function):
    """Run the function in a child, which must end by a kill."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_directory_appears_whole_when_the_block_ends(tmp_path):
    with atomic_directory(tmp_path / "deep" / "new") as directory:
        fill(directory, "1")
        assert directory.parent == tmp_path / "deep" and directory.name.startswith(".")
        assert not (tmp_path / "deep" / "new").exists()
    assert names(tmp_path / "deep") == ["new"] and names(tmp_path / "deep" / "new") == ["a.safetensors"]


def test_an_existing_directory_is_refused_before_any_work(tmp_path):
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match="old exists already"), atomic_directory(tmp_path / "old"):
        pytest.fail("the block must not run")
    assert names(tmp_path) == ["old"]


def test_overwriting_leaves_no_stale_file(tmp_path):
    with atomic_directory(tmp_path / "x") as directory:
        fill(directory, "1")
        (directory / "stale").write_text("1")
    with atomic_directory(tmp_path / "x", overwrite=True) as directory:
        fill(directory, "2")
        assert names(tmp_path / "x") == ["a.safetensors", "stale"]
    assert names(tmp_path) == ["x"] and names(tmp_path / "x") == ["a.safetensors"]


def test_what_holds_no_tensor_files_is_not_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("home", "file"):
        target = atomic_directory(tmp_path / name, overwrite=True)
        with pytest.raises(ValueError, match="not a directory of safetensors"), target:
            pytest.fail("the block must not run")
    assert (tmp_path / "home" / "thesis.tex").exists() and (tmp_path / "file").exists()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_exception_leaves_the_target_untouched_and_nothing_beside_it(tmp_path, error):
    with atomic_directory(tmp_path / "x") as directory:
        fill(directory, "old")
    for target in ("x", "y"):
        with pytest.raises(error), atomic_directory(tmp_path / target, overwrite=True) as directory:
            fill(directory, "half")
            raise error
    assert names(tmp_path) == ["x"] and (tmp_path / "x" / "a.safetensors").read_text() == "old"


def test_an_exception_while_the_directories_are_swapped_puts_the_old_one_back(tmp_path, monkeypatch):
    with atomic_directory(tmp_path / "x") as directory:
        fill(directory, "old")
    rename = Path.rename

    def fail(self, target):
        if self.name.endswith(".partial"):
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no space"), atomic_directory(tmp_path / "x", overwrite=True) as directory:
        fill(directory, "new")
    assert names(tmp_path) == ["x"] and (tmp_path / "x" / "a.safetensors").read_text() == "old"


def test_a_killed_writer_leaves_only_a_hidden_name_that_the_next_one_clears_away(tmp_path):
    def die():
        with atomic_directory(tmp_path / "x") as directory:
            fill(directory, "half")
            (directory / "stale").write_text("1")
            kill()

    killed(die)
    assert not (tmp_path / "x").exists() and all(name.startswith(".") for name in names(tmp_path))
    with atomic_directory(tmp_path / "x") as directory:
        fill(directory, "whole")
    assert names(tmp_path) == ["x"] and names(tmp_path / "x") == ["a.safetensors"]


@pytest.mark.parametrize(
    "owner, function, name, left",
    [(Path, "rename", ".x.partial", "old"), (shutil, "rmtree", ".x.replaced", "new")],
    ids=["between the renames", "before the old one is removed"],
)
def test_a_kill_in_the_swap_loses_neither_directory(tmp_path, monkeypatch, owner, function, name, left):
    with atomic_directory(tmp_path / "x") as directory:
        fill(directory, "old")

    def die():
        real = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda path, *a, **k: kill() if path.name == name else real(path, *a, **k))
        with atomic_directory(tmp_path / "x", overwrite=True) as directory:
            fill(directory, "new")

    killed(die)
    with pytest.raises(ValueError, match="exists already"), atomic_directory(tmp_path / "x"):
        pytest.fail("the block must not run")
    assert (tmp_path / "x" / "a.safetensors").read_text() == left
    with atomic_directory(tmp_path / "x", overwrite=True) as directory:
        fill(directory, "next")
    assert names(tmp_path) == ["x"] and (tmp_path / "x" / "a.safetensors").read_text() == "next"
