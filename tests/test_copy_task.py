"""A text that repeats itself, learnt as GLM-5 was: on all keys, then the indexers alone, then on the selected keys."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import train

from configs import RUNS
from glm5fn import forward_mtp, unflatten
from glm5fn.checkpoint import newest
from glm5fn.command import parse
from glm5fn.generate import generate
from glm5fn.kernels import TORCH
from glm5fn.losses import loss
from glm5fn.model import Engine
from glm5fn.record import read_metrics
from glm5fn.settings import IndexerConfig, Terms

pytestmark = pytest.mark.slow
PERIOD, LENGTH, TOPK, VOCAB, ROWS = 16, 64, 8, 40, 2048
SIZES = {
    "vocab-size": VOCAB,
    "hidden-size": 64,
    "intermediate-size": 96,
    "num-hidden-layers": 3,
    "num-attention-heads": 4,
    "q-lora-rank": 32,
    "kv-lora-rank": 40,
    "qk-nope-head-dim": 12,
    "qk-rope-head-dim": 16,
    "v-head-dim": 20,
    "index-n-heads": 8,
    "index-head-dim": 24,
    "n-routed-experts": 4,
    "moe-intermediate-size": 48,
    "first-k-dense-replace": 1,
    "index-topk-freq": 2,
    "index-skip-topk-offset": 2,
    "num-mtp-depths": 2,
    "index-topk": TOPK,
}
FLAGS = [
    *("--config", "glm5-tiny", *(part for name, size in SIZES.items() for part in (f"--model.{name}", str(size)))),
    *("--data.seq-len", str(LENGTH), "--data.global-batch", "16", "--data.micro-batch", "16"),
    *("--optim.schedule", "constant", "--optim.lr", "3e-3", "--mtp.coef", "0.3"),
]


STAGES = (  # each with the step where it ends
    ("frozen", 250, ["--model.index-topk", str(LENGTH)]),  # so that all is trained on all keys, but for the indexers
    ("dense-warmup", 300, ["--optim.lr", "1e-3"]),
    ("sparse", 400, ["--optim.lr", "1e-3"]),
)


def text(path, seed, rows=ROWS):
    """Rows in which a random block repeats; only what it decides is a target."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, VOCAB, (rows, PERIOD), generator=generator)
    ids = block.repeat(1, LENGTH // PERIOD + 1)[:, : LENGTH + 1]
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    targets[:, : PERIOD - 1] = -100
    save_file({"tokens": tokens, "targets": targets}, path)
    return path


def masses(params, batch, cfg, stage):
    """For each indexer, how much of the attention its keys hold, of the most that as many keys could."""
    found = []

    def watched(teachers, q, k, weights, chosen, segments, real, scale):
        (query, keys), *_ = teachers
        scores = torch.einsum("bshr,btr->bhst", query, keys) * scale
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        attention = scores.masked_fill(later, -torch.inf).softmax(-1).sum(1)
        chosen = TORCH.select(q, k, weights, segments, TOPK) if chosen is None else chosen
        held = attention.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0).sum(-1)
        best = attention.topk(TOPK, -1).values.sum(-1)
        found.append(float(held[:, TOPK:].sum() / best[:, TOPK:].sum()))
        return TORCH.index_loss(teachers, q, k, weights, chosen, segments, real, scale)

    terms = Terms(indexer=IndexerConfig(stage=stage))
    with torch.no_grad():
        loss(params, batch, cfg, terms=terms, kernels=TORCH._replace(index_loss=watched))
    return found


def accuracies(params, batch, cfg):
    """Of the next token, and at each depth, of the targets that are decided."""
    with torch.no_grad():
        main, further = forward_mtp(params, batch["tokens"], cfg)
    result = []
    for depth, logits in enumerate((main, *further)):
        targets = batch["targets"][:, depth:]
        right = logits[:, : LENGTH - depth].argmax(-1) == targets
        result.append(float(right[targets != -100].float().mean()))
    return result


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """By stage: what each of its steps recorded, the accuracies at its end, and the recall at its begin and end."""
    root = tmp_path_factory.mktemp("copy")
    data, held = text(root / "data.safetensors", 1), load_file(text(root / "held.safetensors", 2, 32))
    cfg, found, params = parse(FLAGS, RUNS).run.model, {}, None
    for stage, end, flags in STAGES:
        flags = [*FLAGS, *flags, "--indexer.stage", stage, "--steps", str(end)]
        before = params and masses(params, held, cfg, stage)
        assert train(*flags, "--data.path", data, "--out", root / "x", "--resume", "auto") == 0
        path, _ = newest(root / "x" / "checkpoints")
        params = unflatten(load_file(path / "params.safetensors"))
        after = None if stage == "frozen" else masses(params, held, cfg, stage)
        last = found["records"][-1]["step"] if found else 0
        records = read_metrics(root / "x")
        found["records"] = records
        found[stage] = (records[last:], accuracies(params, held, parse(flags, RUNS).run.model), before, after)
        print(stage, f"accuracies {found[stage][1]}, recall {before} -> {after}")
    return found | {"model": (cfg, params), "held": held["tokens"]}


def fall(records, name, ends=10):
    """The averages of the first and the last records of a stage."""
    values = [record[name] for record in records]
    first, last = sum(values[:ends]) / ends, sum(values[-ends:]) / ends
    print(f"{name} {first:.4g} -> {last:.4g}")
    return first, last


@pytest.mark.parametrize("stage", ["frozen", "sparse"])
def test_what_repeats_is_predicted_one_two_and_three_tokens_ahead(course, stage):
    assert min(course[stage][1]) > 0.95


def test_two_tokens_a_round_and_more_are_written_where_three_are_drafted(course):
    cfg, params = course["model"]
    prompts = course["held"][:, : 2 * PERIOD].tolist()
    *_, plain = generate(params, prompts, cfg, Engine(), most=LENGTH // 2)
    *_, found = generate(params, prompts, cfg, Engine(), most=LENGTH // 2, drafts=3)
    assert [row.ids for row in found] == [row.ids for row in plain]
    rate = sum(len(row.ids) - 1 for row in found) / sum(row.rounds - 1 for row in found)  # the prompt gives the first
    print(f"{rate:.3f} tokens a round")
    assert rate >= 2.0


@pytest.mark.parametrize("stage", ["dense-warmup", "sparse"])
def test_the_indexers_loss_falls(course, stage):
    first, last = fall(course[stage][0], "kl")
    assert last < 0.9 * first


def test_the_selected_keys_come_to_hold_the_attention(course):
    _, _, before, after = course["dense-warmup"]
    assert sum(before) / len(before) < 0.5 and min(after) > 0.9
    assert min(course["sparse"][3]) > 0.9
