import json

import pytest

from glm5fn.__main__ import main
from glm5fn.compare import join

PNG = b"\x89PNG\r\n\x1a\n"
LOSSES = [5.0, 4.0, 3.0, 2.5]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Writes metrics.jsonl of two runs, and stands where they are."""
    monkeypatch.chdir(tmp_path)

    def write(**metrics):
        for run, records in metrics.items():
            (tmp_path / run).mkdir(exist_ok=True)
            lines = [json.dumps({"step": step, **record}) + "\n" for step, record in enumerate(records, 1)]
            (tmp_path / run / "metrics.jsonl").write_text("".join(lines))
        return tmp_path

    return write


def records(losses, **more):
    return [{"loss": loss, **{name: values[i] for name, values in more.items()}} for i, loss in enumerate(losses)]


def row(text, name):
    return next(line.split() for line in text.splitlines() if line.startswith(name))


def test_equal_runs_pass_and_leave_a_picture(runs, capsys):
    directory = runs(one=records(LOSSES), two=records(LOSSES))
    assert main(["compare", "one", "two"]) == 0
    assert (directory / "compare.png").read_bytes().startswith(PNG)
    out = capsys.readouterr().out
    assert "curves drawn to compare.png" in out
    assert out.splitlines()[-1] == "PASS (tolerance 1e-06)"
    assert row(out, "loss") == ["loss", "4", "0.000e+00", "0.000e+00", "1"]


def test_the_figures_are_the_average_and_the_largest_difference_and_where_that_is(runs, capsys):
    runs(one=records(LOSSES), two=records([5.0, 4.25, 2.5, 2.5]))
    assert main(["compare", "one", "two"]) == 1
    out = capsys.readouterr().out
    assert row(out, "loss") == ["loss", "4", "1.875e-01", "5.000e-01", "3"]
    assert out.splitlines()[-1] == "FAIL: loss differs by 0.188 on average (tolerance 1e-06)"


@pytest.mark.parametrize(("tolerance", "code"), [("0.25", 0), ("0.24", 1)])
def test_an_average_at_the_tolerance_passes_and_one_above_fails(runs, tolerance, code):
    runs(one=records([4.0, 3.0]), two=records([4.5, 3.0]))
    assert main(["compare", "one", "two", "--tolerance", tolerance]) == code


def test_every_key_that_ends_in_loss_is_judged(runs, capsys):
    runs(one=records([4.0, 3.0], mtp_loss=[6.0, 5.0]), two=records([4.0, 3.0], mtp_loss=[6.0, 5.5]))
    assert main(["compare", "one", "two"]) == 1
    assert "FAIL: mtp_loss differs by 0.25 on average" in capsys.readouterr().out


def test_a_loss_that_the_runs_share_at_no_step_is_shown_but_not_judged(runs, capsys):
    one, two = records([4.0, 3.0]), records([4.0, 3.0])
    one[0]["eval_loss"], two[1]["eval_loss"] = 5.0, 6.0
    runs(one=one, two=two)
    assert main(["compare", "one", "two"]) == 0
    assert row(capsys.readouterr().out, "eval_loss") == ["eval_loss", "0"]


def test_the_gradient_norm_is_compared_relative_to_the_larger_and_is_not_judged(runs, capsys):
    runs(one=records([4.0, 3.0], grad_norm=[8.0, 0.0]), two=records([4.0, 3.0], grad_norm=[6.0, 0.0]))
    assert main(["compare", "one", "two"]) == 0
    assert row(capsys.readouterr().out, "grad_norm") == ["grad_norm", "(relative)", "2", "1.250e-01", "2.500e-01", "1"]


def test_steps_are_joined_by_number_not_by_place():
    one = {step: {"loss": float(step)} for step in (1, 2, 3)}
    two = {step: {"loss": float(step)} for step in (2, 3, 4)}
    curves = join(one, two, "loss")
    assert (curves.steps, curves.gaps) == ([2, 3], [0.0, 0.0])


def test_first_leaves_out_what_comes_after(runs, capsys):
    runs(one=records([4.0, 3.0, 2.0]), two=records([4.0, 3.0, 9.0]))
    assert main(["compare", "one", "two", "--first", "2"]) == 0
    assert "two, steps 1 to 2" in capsys.readouterr().out


def test_a_step_that_is_finite_in_neither_run_is_left_out_and_said(runs, capsys):
    runs(one=records([4.0, None, 2.0]), two=records([4.0, None, 2.0]))
    assert main(["compare", "one", "two"]) == 0
    assert "left out, finite in neither run: step 2" in capsys.readouterr().out


def test_a_step_that_is_finite_in_one_run_alone_fails(runs, capsys):
    runs(one=records([4.0, 3.0, 2.0]), two=records([4.0, None, None]))
    assert main(["compare", "one", "two"]) == 1
    assert "FAIL: loss is finite in one run alone at step 2, 3" in capsys.readouterr().out


def test_the_picture_goes_where_it_is_asked_for(runs):
    directory = runs(one=records(LOSSES), two=records([5.0, 4.0, 3.5, 2.5]))
    main(["compare", "one", "two", "--plot", "pictures/of/runs.png"])
    assert (directory / "pictures/of/runs.png").read_bytes().startswith(PNG)
    assert not (directory / "compare.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none", "two"], "none must be the directory of a run that has made a step"),
        (["empty", "two"], "empty must be the directory of a run that has made a step"),
        (["one", "damaged"], "damaged/metrics.jsonl must hold one JSON object with a step on each line"),
        (["one", "later"], "is so at none of steps 1 to 2 of one and steps 5 to 5 of later"),
        (["one", "broken"], "loss must be a finite number at some step of both runs"),
        (["one", "later", "--first", "3"], "no steps of later"),
        (["one", "two", "--first", "0"], "--first (0) must be at least 1"),
        (["one", "two", "--tolerance", "-1"], "--tolerance (-1.0) must be at least 0"),
        (["one", "two", "--plot", "one"], "--plot one cannot be written"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_exit_code_2(runs, capsys, options, message):
    pair = records([4.0, 3.0])
    directory = runs(
        one=pair, two=pair, empty=[], damaged=pair, later=[{"step": 5, "loss": 4.0}], broken=records([None])
    )
    with (directory / "damaged/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo\n')
    assert main(["compare", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["one", "two"], ["compare", "one"], ["compare", "one", "two", "--frist", "3"]])
def test_a_command_line_that_is_not_understood_ends_with_exit_code_2(options):
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
