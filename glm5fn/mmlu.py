"""MMLU (Hendrycks et al., arXiv 2009.03300): questions with four choices, answered by the likeliest letter."""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from .inference import Loaded
from .mesh import rank, together
from .record import tell
from .score import Scored, encode_pair, score
from .sources import LINES, placed_rows, read_object

LETTERS = "ABCD"
DEV, TEST = "dev", "test"  # the questions that are shown with their answers, and those that are asked


class Question(NamedTuple):
    """answer: the number of the right one of the choices. place: file and line, for messages."""

    subject: str
    text: str
    choices: tuple[str, ...]
    answer: int
    place: str


class Prompt(NamedTuple):
    """pairs: of (context, continuation), one for each letter. dropped: how many examples did not fit."""

    pairs: list[tuple[np.ndarray, np.ndarray]]
    dropped: int


def measure(loaded: Loaded, path: Path, shots: int, batch: int) -> tuple[str, dict[str, Any]]:
    """The table and the record of how many questions are answered rightly, by subject and in all.

    The answer is the letter with the largest log-probability behind the question, the first of equals.
    """
    questions, prompts = together(lambda: prompts_of(loaded, path, shots))
    pairs = [pair for prompt in prompts for pair in prompt.pairs]
    found = score(loaded, pairs, batch)
    if (cut := sum(prompt.dropped > 0 for prompt in prompts)) and rank() == 0:
        tell(
            f"{cut} of {len(prompts)} prompts have fewer than {shots} examples, so that they fit the model's positions"
        )
    right = [likeliest(found[4 * n : 4 * n + 4]) == question.answer for n, question in enumerate(questions)]
    return summary(questions, right, {"task": "mmlu", "shots": shots, "prompts_cut": cut})


def likeliest(scores: Sequence[Scored]) -> int:
    return max(range(len(scores)), key=lambda n: scores[n].log)


def summary(questions: Sequence[Question], right: Sequence[bool], how: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    asked = Counter(question.subject for question in questions)
    hits = Counter(question.subject for question, hit in zip(questions, right, strict=True) if hit)
    subjects = {
        name: {"questions": asked[name], "right": hits[name], "accuracy": hits[name] / asked[name]}
        for name in sorted(asked)
    }
    accuracy, mean = sum(right) / len(right), fmean(each["accuracy"] for each in subjects.values())
    rows = [(name, each["questions"], each["accuracy"]) for name, each in subjects.items()]
    rows += [("all questions", len(questions), accuracy), (f"mean of {len(subjects)} subjects", "", mean)]
    width = max(len(name) for name, *_ in rows)
    lines = [f"{'':{width}}{'questions':>12}{'accuracy':>10}"]
    lines += [f"{name:{width}}{count:>12}{value:10.4f}" for name, count, value in rows]
    record = how | {"questions": len(questions), "accuracy": accuracy, "mean_of_subjects": mean, "subjects": subjects}
    return "\n".join(lines), record


# --- prompts ---


def prompts_of(loaded: Loaded, path: Path, shots: int) -> tuple[list[Question], list[Prompt]]:
    """Raises ValueError for files that cannot be read, a subject with too few examples, a question that is too long."""
    asked = read(path, TEST)
    shown: dict[str, list[Question]] = {}
    for question in read(path, DEV) if shots else ():
        shown.setdefault(question.subject, []).append(question)
    for question in asked:
        if (found := len(shown.get(question.subject, ()))) < shots:
            need = f"--shots ({shots}) needs as many: set a smaller one"
            raise ValueError(f"{path}: has {found} examples of {question.subject} in {DEV}, {need}")
    encode, limit = loaded.tokenizer.encode, loaded.cfg.max_position_embeddings
    return asked, [prompt_of(question, shown.get(question.subject, [])[:shots], encode, limit) for question in asked]


def prompt_of(
    question: Question, examples: Sequence[Question], encode: Callable[[list[str]], list[np.ndarray]], limit: int
) -> Prompt:
    """The prompt with as many of the examples, the last ones, as fit into so many positions."""
    for dropped in range(len(examples) + 1):
        text = prompt_text(question, examples[dropped:])
        pairs = encode_pair(encode, text, *(f" {letter}" for letter in LETTERS))
        if any(not len(continuation) for _, continuation in pairs):
            raise ValueError(
                f"{question.place}: the tokenizer joins a letter to what stands before it: use another one"
            )
        longest = max(len(context) + len(continuation) - 1 for context, continuation in pairs)
        if longest <= limit:
            return Prompt(pairs, dropped)
    raise ValueError(
        f"{question.place}: the question takes {longest} tokens without any example, "
        f"must be at most the model's max_position_embeddings ({limit})"
    )


def prompt_text(question: Question, examples: Sequence[Question]) -> str:
    """The same as that of lm-evaluation-harness's tasks `mmlu_SUBJECT`."""
    subject = question.subject.replace("_", " ")
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    shown = [f"{asked_text(example)} {LETTERS[example.answer]}\n\n" for example in examples]
    return "".join((head, *shown, asked_text(question)))


def asked_text(question: Question) -> str:
    choices = [f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, question.choices, strict=True)]
    return f"{question.text.strip()}\n{''.join(choices)}Answer:"


# --- files ---


def files_of(path: Path, split: str) -> list[Path]:
    """A split's files: SPLIT/SUBJECT_SPLIT.csv, or SPLIT.jsonl, or .jsonl files in the directory SPLIT."""
    layouts = [sorted((path / split).glob(f"*_{split}.csv"))]
    layouts += [[file] for end in LINES if (file := path / f"{split}{end}").is_file()]
    layouts += [sorted((path / split).glob(f"*{end}")) for end in LINES]
    found = [files for files in layouts if files]
    if len(found) > 1:
        named = ", ".join(str(files[0]) for files in found)
        raise ValueError(f"{path}: has questions for {split} more than once, in {named}: keep one of them")
    return found[0] if found else []


def refuse(path: Path, shots: int) -> None:
    """Raise ValueError for a directory that holds no questions."""
    for split in (TEST, DEV) if shots else (TEST,):
        if not files_of(path, split):
            layouts = f"{split}/SUBJECT_{split}.csv or {split}.jsonl"
            raise ValueError(f"--path {path}: has no questions for {split}: must be a directory with {layouts}")


def read(path: Path, split: str) -> list[Question]:
    """The questions of a split. Raises ValueError that names file and line."""
    found = [
        question
        for file in files_of(path, split)
        for question in (csv_questions(file, split) if file.suffix == ".csv" else line_questions(file))
    ]
    if not found:
        raise ValueError(f"{path}: has no question in its files for {split}")
    return found


def csv_questions(path: Path, split: str) -> Iterator[Question]:
    """Rows of question, four choices and a letter."""
    subject = path.stem.removesuffix(f"_{split}")
    with path.open("rb") as file:
        rows = csv.reader((line.decode("utf-8-sig" if n == 0 else "utf-8") for n, line in enumerate(file)), strict=True)
        try:
            for row in filter(None, rows):
                if len(row) != 6 or row[-1].strip() not in tuple(LETTERS):
                    must = "must have six: a question, four choices and a letter of ABCD"
                    raise ValueError(f"the row has {len(row)} columns and ends in {row[-1]!r}, {must}")
                text, *choices, letter = row
                yield Question(subject, text, tuple(choices), LETTERS.index(letter.strip()), f"{path}:{rows.line_num}")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{rows.line_num + 1}: must be UTF-8 text ({error.reason})") from error
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{path}:{rows.line_num}: {error}") from error


def line_questions(path: Path) -> Iterator[Question]:
    """Objects with question, subject, choices and the number of the answer."""
    for place, question in placed_rows(path, question_of):
        yield question._replace(place=place)


def question_of(line: bytes) -> Question:
    row = read_object(line)
    text, subject, choices, answer = (row.get(key) for key in ("question", "subject", "choices", "answer"))
    if not (isinstance(text, str) and isinstance(subject, str) and subject):
        raise ValueError("the object must have texts as question and subject")
    if not (isinstance(choices, list) and len(choices) == len(LETTERS) and all(isinstance(c, str) for c in choices)):
        raise ValueError(f"choices ({choices!r}) must be a list of four texts")
    if type(answer) is not int or not 0 <= answer < len(LETTERS):
        raise ValueError(f"answer ({answer!r}) must be the number of a choice, from 0 to 3")
    return Question(subject, text, tuple(choices), answer, "")
