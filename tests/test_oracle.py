"""Logits and gradients equal those of transformers, on random weights that its own save_pretrained wrote."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
)

from glm5fn import flatten, forward, load, loss, model_specs, value_and_grad
from glm5fn.spec import hf_keys, rows

COMMON = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 2,
    "eos_token_id": [2, 3, 5],
    "max_position_embeddings": 256,
}
GLM4 = COMMON | {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
MOE = COMMON | {"first_k_dense_replace": 99, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
EXPERTS = MOE | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}
ROPE = {"rope_type": "default", "rope_theta": 5e5}
VARIANTS = {
    "glm4": (Glm4ForCausalLM, Glm4Config, GLM4),
    "glm4, factor at the top": (Glm4ForCausalLM, Glm4Config, GLM4 | {"partial_rotary_factor": 0.25}),
    "glm4, factor nested": (
        Glm4ForCausalLM,
        Glm4Config,
        GLM4 | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}},
    ),
    "glm4, all of a head rotated": (Glm4ForCausalLM, Glm4Config, GLM4 | {"partial_rotary_factor": 1.0}),
    "glm4, no bias": (Glm4ForCausalLM, Glm4Config, GLM4 | {"attention_bias": False}),
    "glm4, tied": (Glm4ForCausalLM, Glm4Config, GLM4 | {"tie_word_embeddings": True}),
    "glm4, 12 layers": (Glm4ForCausalLM, Glm4Config, GLM4 | {"num_hidden_layers": 12}),
    "glm4, one kv head a head": (Glm4ForCausalLM, Glm4Config, GLM4 | {"num_key_value_heads": 4}),
    "glm": (GlmForCausalLM, GlmConfig, GLM4),
    "glm, tied, no bias": (GlmForCausalLM, GlmConfig, GLM4 | {"tie_word_embeddings": True, "attention_bias": False}),
    "glm4_moe, all dense": (Glm4MoeForCausalLM, Glm4MoeConfig, MOE),
    "glm4_moe, qk norm and bias": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        MOE | {"use_qk_norm": True, "attention_bias": True, "num_hidden_layers": 3},
    ),
    "glm4_moe, experts": (Glm4MoeForCausalLM, Glm4MoeConfig, EXPERTS),
    "glm4_moe, experts, qk norm and bias": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        EXPERTS | {"use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe, experts in groups, not normed, two shared": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        EXPERTS | {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2, "use_qk_norm": True},
    ),
    "glm4_moe, experts, 12 layers": (Glm4MoeForCausalLM, Glm4MoeConfig, EXPERTS | {"num_hidden_layers": 12}),
}


def randomize(model):
    """Every weight random: norms and biases from 0.5 to 1.5, matrices of a spread that tells heads apart.

    The routers' biases are near 7, as released ones are.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.15, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(6.8, 7.1, generator=generator)


def gradient_of(oracle, keys):
    """The gradient of one of our rows; transformers holds experts in one parameter, which has no number."""
    theirs = dict(oracle.named_parameters())
    if ".experts." in keys[0]:
        layer, _, name = keys[0].partition(".experts.")
        return theirs[f"{layer}.experts.{'down_proj' if 'down_proj' in name else 'gate_up_proj'}"].grad
    return torch.stack([theirs[key].grad for key in keys])


@pytest.mark.filterwarnings("ignore:.*num_nextn_predict_layers is 1")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_gradient_equal_those_of_transformers(variant, tmp_path, device):
    kind, config, settings = VARIANTS[variant]
    oracle = kind(config(**settings)).eval()
    randomize(oracle)
    oracle.save_pretrained(tmp_path)
    oracle = oracle.to(device)
    cfg, params = load(tmp_path, device=device)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 96, (2, 17), generator=generator)
    targets = torch.randint(0, 96, (2, 17), generator=generator)
    targets[0, 3:6] = -100
    tokens, targets = tokens.to(device), targets.to(device)

    logits = oracle(tokens).logits
    ours = forward(params, tokens, cfg)
    assert (ours - logits).abs().max() <= 1e-5 * logits.abs().max()

    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    (value, _), grads = value_and_grad(loss)(params, {"tokens": tokens, "targets": targets}, cfg)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-6, atol=0)
    flat = flatten(grads)
    for path, row in rows(model_specs(cfg)):
        if row.part == "state":
            assert not flat[path].any(), path
            continue
        wanted = gradient_of(oracle, hf_keys(row, cfg.dims)).view(flat[path].shape)
        assert (flat[path] - wanted).norm() <= 1e-4 * wanted.norm(), path
