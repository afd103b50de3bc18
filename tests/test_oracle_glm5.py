"""Logits, gradients and selected keys equal those of transformers' GLM-5, on random weights that it wrote itself."""

import json
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from test_oracle import randomize
from transformers import AutoConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaIndexer

from glm5fn import flatten, forward, load, loss, value_and_grad
from glm5fn.block import block
from glm5fn.kernels.reference import support

STEPS = 33
CFG_M = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 96,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "eos_token_id": [2, 3, 5],
    "pad_token_id": 2,
}
SIX, TWO = {"num_hidden_layers": 6}, {"num_hidden_layers": 2}
FLAT = {"rope_theta": 1e4, "rope_parameters": None}
VARIANTS = {  # and the layers that have an indexer
    "as it is": ({}, range(4)),
    "1 key": ({"index_topk": 1, "index_topk_freq": 2}, [0, 1, 3]),
    "64 keys, all that there are": ({"index_topk": 64}, range(4)),
    "2 groups": ({"n_group": 2, "index_n_heads": 8}, range(4)),
    "weights not normed": ({"norm_topk_prob": False}, range(4)),
    "2 shared experts": ({"n_shared_experts": 2}, range(4)),
    "schedule by list": (SIX | {"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]}, [0, 1, 4]),
    "schedule by pattern": (SIX | {"index_topk_pattern": "FFSSFS"}, [0, 1, 4]),
    "schedule by freq and offset": (SIX | {"index_topk_freq": 2, "index_skip_topk_offset": 3}, [0, 1, 2, 4]),
    "12 layers": (
        {"num_hidden_layers": 12, "index_topk_freq": 4, "index_skip_topk_offset": 3, "n_group": 2},
        [0, 1, 2, 6, 10],
    ),
    "head_dim 18, tied": (TWO | {"head_dim": 18, "tie_word_embeddings": True}, range(2)),
    "theta flat, MoE from the first layer": (TWO | FLAT | {"first_k_dense_replace": 0}, range(2)),
    "indexer's rope by name": (TWO | {"indexer_rope_interleave": True}, range(2)),
}


def stable_topk(scores, count, dim=-1):
    """At ties the lower position first, which torch leaves open."""
    ordered = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((ordered.values[..., :count], ordered.indices[..., :count]))


def with_stable_topk(select):
    def forward(*args, **kwargs):
        with patch.object(torch.Tensor, "topk", stable_topk):
            return select(*args, **kwargs)

    return forward


def make_oracle(settings, directory):
    """The model of transformers, saved with every number random; beside it the config.json that both read."""
    text = json.dumps({name: value for name, value in settings.items() if value is not None})
    (directory / "config.json").write_text(text)
    oracle = GlmMoeDsaForCausalLM(AutoConfig.from_pretrained(directory)).eval()
    randomize(oracle)
    for module in oracle.modules():
        if isinstance(module, GlmMoeDsaAttention):  # far apart, so that its place before the indexer shows
            torch.nn.init.uniform_(module.q_a_layernorm.weight, 0.2, 3.0, generator=torch.Generator().manual_seed(9))
    oracle.save_pretrained(directory)
    (directory / "config.json").write_text(text)
    return oracle


def written_gradients(oracle, directory):
    """The gradients of an oracle in our layout: it saves them as weights, and we read them."""
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, buffer in oracle.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
    text = (directory / "config.json").read_text()
    oracle.save_pretrained(directory)
    (directory / "config.json").write_text(text)
    return load(directory, device=oracle.device)[1]


@pytest.mark.filterwarnings("ignore:.*num_nextn_predict_layers is 1")
@pytest.mark.parametrize("changes, full", VARIANTS.values(), ids=VARIANTS)
def test_logits_selected_keys_and_every_gradient_equal_those_of_transformers(
    changes, full, tmp_path, monkeypatch, device
):
    monkeypatch.setattr(GlmMoeDsaIndexer, "forward", with_stable_topk(GlmMoeDsaIndexer.forward))
    oracle = make_oracle(CFG_M | changes, tmp_path).to(device)
    cfg, params = load(tmp_path, device=device)
    assert [i for i, layer in params["layers"].items() if "indexer" in layer["attn"]] == [str(i) for i in full]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 96, (2, STEPS), generator=generator)  # without padding, which they give no gradient
    targets = torch.randint(0, 96, (2, STEPS), generator=generator)
    targets[0, 3:6] = -100
    tokens, targets = tokens.to(device), targets.to(device)

    theirs, ours = [], []
    for module in oracle.modules():
        if isinstance(module, GlmMoeDsaAttention):
            module.register_forward_hook(lambda module, args, output: theirs.append(output[2]))

    def watched(*args, **kwargs):
        passed = block(*args, **kwargs)
        ours.append(passed.selected.chosen)
        return passed

    logits = oracle(tokens).logits
    found = forward(params, tokens, cfg, block=watched)
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()
    causal = torch.ones(STEPS, STEPS, dtype=torch.bool, device=device).tril()
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        allowed = support(other, STEPS) & causal
        assert torch.equal(causal.expand(2, -1, -1) if one is None else support(one, STEPS), allowed), i
        assert (allowed.sum(-1) == torch.arange(1, STEPS + 1, device=device).clamp(max=cfg.index_topk)).all()
        assert i in full or one is ours[i - 1]

    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    (value, _), grads = value_and_grad(loss)(params, {"tokens": tokens, "targets": targets}, cfg)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-6, atol=0)
    wanted = flatten(written_gradients(oracle, tmp_path))
    for path, grad in flatten(grads).items():
        assert (grad - wanted[path]).norm() <= 1e-4 * wanted[path].norm(), path
        alone = cfg.index_topk == 1 and ".q_" in path  # a query with one key has no choice
        assert grad.any() != (alone or "indexer" in path or "router_bias" in path), path
