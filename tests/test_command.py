"""What the command line refuses, by what words; nothing is written then, and no process started."""

from dataclasses import replace

import pytest
from training import RUN, numbers, text, train

from configs import RUNS
from glm5fn.command import parse
from glm5fn.settings import FSDP, dump

DP2 = ["--config", "dense-dp2"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--optm.lr 1", "--optim.lr"),
        ("--data.seqlen 8", "--data.seq-len"),
        ("--optim.learning-rate 1", "Unrecognized options: --optim.learning-rate"),
        ("--checkpoint.evry 8", "--checkpoint.every"),
        ("--model.hidden-sise 8", "--model.hidden-size"),
        ("--step 8", "--steps"),
        ("--config dsa-tiny --indexer.stag sparse", "--indexer.stage"),
        ("--router.bias-rte 1", "--router.bias-rate"),
        ("--mtp.coeff 1", "--mtp.coef"),
        ("--config glm5-tny", "--config glm5-tny is not known: did you mean glm5-tiny?"),
        ("--exprt x", "--export"),
        ("--name other", "Unrecognized options: --name"),
        ("8", "Unrecognized options: 8"),
        ("--config dense-dp3", "--config dense-dp3 is not known: did you mean dense-dp2?"),
        ("--config huge", "--config huge is not known: must be one of dense-tiny, "),
        ("--config none.yaml", "none.yaml: [Errno 2] No such file or directory"),
    ],
)
def test_what_is_not_known_is_refused_with_the_nearest_name(refuse, argv, said):
    assert said in refuse(*argv.split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--optim.lr fast", "--optim.lr: could not convert string to float: 'fast'"),
        ("--optim.lr nan", "optim.lr (nan) must be a finite number above 0"),
        ("--optim.lr inf", "optim.lr (inf) must be a finite number above 0"),
        ("--optim.lr -1", "optim.lr (-1.0) must be a finite number above 0"),
        ("--optim.lr 0", "optim.lr (0.0) must be a finite number above 0"),
        ("--optim.lr 1e-9", "optim.min-lr (3e-05) must be from 0 to optim.lr (1e-09)"),
        ("--optim.min-lr -1", "optim.min-lr (-1.0) must be from 0 to optim.lr (0.0003)"),
        ("--optim.name adam", "invalid choice 'adam'"),
        ("--optim.beta1 1", "optim.beta1 (1.0) must be at least 0 and below 1"),
        ("--optim.beta2 nan", "optim.beta2 (nan) must be at least 0 and below 1"),
        ("--optim.eps 0", "optim.eps (0.0) must be finite and above 0"),
        ("--optim.weight-decay inf", "optim.weight-decay (inf) must be finite and at least 0"),
        ("--optim.clip nan", "optim.clip (nan) must be finite and at least 0"),
        ("--optim.warmup-steps -1", "optim.warmup-steps (-1) must be at least 0"),
        ("--optim.decay-steps 10", "optim.decay-steps (10) must be above optim.warmup-steps (10)"),
        ("--steps 0", "steps (0) must be at least 1"),
        ("--steps -1", "steps (-1) must be at least 1"),
        ("--steps 1.5", "--steps: invalid literal for int() with base 10: '1.5'"),
        ("--seed -1", "seed (-1) must be at least 0"),
        ("--eval-every -1", "eval-every (-1) must be at least 0"),
        ("--data.held-out nan", "data.held-out (nan) must be at least 0 and below 1"),
        ("--data.held-out 1", "data.held-out (1.0) must be at least 0 and below 1"),
        ("--data.micro-batch 0", "data.micro-batch (0) must be at least 1"),
        ("--checkpoint.every -1", "checkpoint.every (-1) must be at least 0"),
        ("--checkpoint.keep 0", "checkpoint.keep (0) must be at least 1"),
        ("--precision fp16", "invalid choice 'fp16'"),
        ("--device tpu", "invalid choice 'tpu'"),
        ("--deterministic true", "Unrecognized options: true"),
        ("--model.head-dim 0", "head_dim (0) must be at least 1"),
        ("--model.pad-token-id 320", "pad_token_id (320) must be from 0 to vocab_size (320) - 1"),
        ("--config glm4-9b --model.use-qk-norm", "use_qk_norm"),
        ("--model.head-dim 7", "7 rotary dims: must be even"),
        ("--model.num-key-value-heads 4", "num_attention_heads (6) must be a multiple of num_key_value_heads (4)"),
        ("--model.partial-rotary-factor inf", "partial_rotary_factor (inf) must be finite and above 0"),
        ("--model.rope-theta nan", "rope_theta (nan) must be finite and above 0"),
        ("--model.rms-norm-eps 0", "rms_norm_eps (0.0) must be finite and above 0"),
        ("--indexer.stage sparse", "indexer.stage (sparse) must be frozen: the model has no indexer (index_topk is 0)"),
        (
            "--config mla-tiny --indexer.stage dense-warmup",
            "indexer.stage (dense-warmup) must be frozen: the model has",
        ),
        ("--config dsa-tiny --indexer.stage warmup", "invalid choice 'warmup'"),
        ("--config dsa-tiny --indexer.coef 0", "indexer.coef (0.0) must be above 0: nothing else trains the indexers"),
        ("--config dsa-tiny --indexer.coef -1", "indexer.coef (-1.0) must be finite and at least 0"),
        ("--config dsa-tiny --indexer.teacher all", "invalid choice 'all'"),
        ("--config moe-tiny --router.bias-rate -1", "router.bias-rate (-1.0) must be finite and at least 0"),
        ("--config moe-tiny --router.balance-coef nan", "router.balance-coef (nan) must be finite and at least 0"),
        ("--config moe-tiny --router.z-coef inf", "router.z-coef (inf) must be finite and at least 0"),
        ("--config mtp-tiny --mtp.coef -0.1", "mtp.coef (-0.1) must be finite and at least 0"),
        ("--config moe-tiny --model.num-experts-per-tok 9", "num_experts_per_tok (9)"),
        ("--data.path none.txt", "none.txt: is not there: data.path must be a file"),
        ("--data.tokenizer none.json", "none.json: is not there: a tokenizer must be 'bytes'"),
        (f"--data.path {__file__}", "test_command.py: data.path must end in one of .jsonl, .jsonl.gz"),
        (f"--data.tokenizer {__file__}", "test_command.py: must be a tokenizer.json ("),
        ("--model.vocab-size 256", "bytes has 257 tokens, so vocab_size (256) must be at least 257"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_it_must_be(refuse, argv, said):
    assert said in refuse(*argv.split())


def test_all_that_is_wrong_is_said_at_once(refuse):
    said = refuse("--steps", "0", "--optim.lr", "nan", "--checkpoint.keep", "0")
    assert all(name in said for name in ("steps (0)", "optim.lr (nan)", "checkpoint.keep (0)"))


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("--optim.name sgd --optim.beta2 0.9", "--optim.beta2 would change nothing, since optim.name is sgd"),
        ("--optim.schedule constant --optim.min-lr 0", "--optim.min-lr would change nothing, since optim.schedule is"),
        ("--optim.schedule constant --optim.decay-steps 9", "--optim.decay-steps would change nothing"),
        ("--data.field body", "--data.field would change nothing, since data.path holds no rows"),
        ("--data.path x.safetensors --data.held-out 0.5", "--data.held-out would change nothing, since data.path"),
        ("--data.path x.safetensors --data.tokenizer t.json", "--data.tokenizer would change nothing"),
        ("--data.path x.safetensors --eval-every 2", "--eval-every would change nothing"),
        ("--data.held-out 0 --eval-every 2", "--eval-every would change nothing, since data.held-out is 0"),
        ("--router.bias-rate 0.1", "--router.bias-rate would change nothing, since the model has no experts"),
        ("--router.balance-coef 0.1", "--router.balance-coef would change nothing, since the model has no experts"),
        ("--router.z-coef 0.1", "--router.z-coef would change nothing, since the model has no experts"),
        ("--mtp.coef 0.2", "--mtp.coef would change nothing, since the model predicts no further tokens"),
        (
            "--config dsa-tiny --mtp.detach-trunk",
            "--mtp.detach-trunk would change nothing, since the model predicts no",
        ),
        ("--config mtp-tiny --mtp.coef 0 --mtp.detach-head", "--mtp.detach-head would change nothing, since mtp.coef"),
        ("--config mtp-tiny --mtp.share-indices", "would change nothing, since the model predicts one further token"),
        ("--indexer.coef 0.5", "--indexer.coef would change nothing, since indexer.stage is frozen"),
        ("--config dsa-tiny --indexer.stage frozen --indexer.teacher served", "since indexer.stage is frozen"),
        ("--config dsa-tiny --indexer.teacher served", "since no layer of the model shares keys"),
        ("--config dsa-warmup-tiny --router.bias-rate 0.1", "since indexer.stage is dense-warmup"),
        ("--config dsa-warmup-tiny --router.z-coef 0.1", "since indexer.stage is dense-warmup"),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused_with_what_makes_it_so(refuse, argv, why):
    assert why in refuse(*argv.split())


def test_what_a_config_sets_without_use_is_no_fault():
    run = RUNS["dense-tiny"]
    runs = {"sgd": replace(run, optim=replace(run.optim, name="sgd", beta2=0.9))}
    assert parse(["--config", "sgd", "--optim.schedule", "constant"], runs).run.optim.beta2 == 0.9


@pytest.mark.parametrize(
    ("argv", "equation"),
    [
        (
            "--mesh.dp-shard 4 --data.global-batch 6 --data.micro-batch 1",
            "data.global-batch (6) must be a multiple of data.micro-batch (1) x mesh.dp-replicate (1) x "
            "mesh.dp-shard (4) = 4",
        ),
        ("--data.global-batch 2 --data.micro-batch 4", "(2) must be a multiple of data.micro-batch (4) x mesh.dp-"),
        ("--mesh.dp-replicate 2 --data.global-batch 12", "x mesh.dp-replicate (2) x mesh.dp-shard (2) = 16"),
        ("--mesh.dp-shard 0", "mesh.dp-shard (0) must be at least 1"),
        ("--data.seq-len 0", "data.seq-len (0) must be at least 1"),
        ("--data.seq-len 4097", "data.seq-len (4097) must be at most the model's max_position_embeddings (4096)"),
    ],
)
def test_batches_and_meshes_that_do_not_divide_are_refused_with_the_equation(refuse, argv, equation):
    assert equation in refuse(*DP2, *argv.split())


@pytest.mark.parametrize(
    ("argv", "equation"),
    [
        ("--config dense-tiny --mesh.tp 4", "num_attention_heads (6) must divide evenly over mesh.tp (4): set it to a"),
        ("--config dense-tiny --mesh.tp 6", "num_key_value_heads (2) must divide evenly over mesh.tp (6)"),
        ("--config dense-tiny --mesh.tp 2 --model.intermediate-size 511", "intermediate_size (511) must divide evenly"),
        ("--config dense-tiny --mesh.tp 2 --model.vocab-size 321", "vocab_size (321) must divide evenly over mesh.tp"),
        ("--config moe-tiny --mesh.tp 0", "mesh.tp (0) must be at least 1"),
        (
            "--config moe-tiny --mesh.tp 2 --model.moe-intermediate-size 129",
            "n_shared_experts (1) x moe_intermediate_size (129) = 129 must divide evenly over mesh.tp (2)",
        ),
        (
            "--config moe-tiny --mesh.tp 2 --model.moe-intermediate-size 129 --mesh.tp-experts ffn",
            "moe_intermediate_size (129) must divide evenly over mesh.tp (2): set it to a divisor; n_shared_experts",
        ),
        ("--config moe-tiny --mesh.tp 2 --mesh.ep 2", "mesh.ep (2) must divide mesh.dp-shard (1) x mesh.cp (1) = 1"),
        ("--config moe-tiny --mesh.tp-experts ffn", "--mesh.tp-experts would change nothing, since mesh.tp is 1"),
    ],
)
def test_sizes_that_ranks_cannot_share_are_refused_with_the_equation(refuse, argv, equation):
    assert equation in refuse(*argv.split())


@pytest.mark.parametrize(
    ("store", "problem"),
    [
        ({"fsdp": ("embed",)}, "layout.store.tp () must be heads, kv_heads, ffn"),
        ({**FSDP.store, "fsdp": ("heads", "embed")}, "layout.store (heads) must be left to layout.store.tp"),
    ],
)
def test_a_layout_that_splits_less_than_the_ranks_compute_is_refused(refuse, tmp_path, store, problem):
    run = RUNS["dense-tp2"]
    old = replace(run, layout=replace(run.layout, store=store))
    (tmp_path / "old.yaml").write_text(dump(old))
    assert problem in refuse("--config", "old.yaml")


@pytest.mark.parametrize("started", ["1", "3", "4", "many"])
def test_as_many_processes_as_the_mesh_has_ranks_must_have_been_started(refuse, monkeypatch, started):
    monkeypatch.setenv("WORLD_SIZE", started)
    needs = "mesh.dp-replicate (1) x mesh.dp-shard (2) x mesh.cp (1) x mesh.tp (1) = 2"
    assert f"started {started} processes, the mesh needs {needs}" in refuse(*DP2)


def test_a_window_of_one_token_has_one_target_and_trains(tmp_path):
    argv = [*RUN, "--data.seq-len", "1", "--data.path", text(tmp_path), "--steps", "2"]
    assert train(*argv, "--out", tmp_path / "x") == 0
    assert [row[-2] for row in numbers(tmp_path / "x")] == [4, 8]


def test_help_shows_every_flag_and_ends_with_code_0(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train(*DP2, "--help") == 0
    said = capsys.readouterr().out
    assert all(flag in said for flag in ("--config", "--mesh.dp-shard", "--optim.lr", "--model.hidden-size", "--seed"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("spelt", "value"), [("1e-4", 1e-4), (".1", 0.1), ("3", 3.0)])
def test_numbers_may_be_spelt_in_every_way_of_python(spelt, value):
    assert parse(["--optim.lr", spelt], RUNS).run.optim.lr == value
