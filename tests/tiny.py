"""Small models whose sizes all differ, so that a swap of two dims cannot hide, and every weight random."""

import torch

from glm5fn import ModelConfig, flatten, init_params, unflatten
from glm5fn.batch import prepare
from glm5fn.comm import LOCAL


def tiny(**changes):
    """GLM-4-0414's block by default: four norms, biases, half of each head rotated."""
    settings = {
        "model_type": "glm4",
        "vocab_size": 29,
        "hidden_size": 22,
        "intermediate_size": 26,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    return ModelConfig(**(settings | changes))


PLAIN = {"model_type": "glm5_dense", "attention_bias": False, "partial_rotary_factor": 1.0}
LATENT = {  # latent attention in 3 heads: queries of 6 + 4 dims, values of 5
    "model_type": "glm5_dense",
    "attention": "mla",
    "attention_bias": False,
    "partial_rotary_factor": 1.0,
    "num_attention_heads": 3,
    "num_key_value_heads": 0,
    "head_dim": 0,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
SPARSE = LATENT | {"index_n_heads": 2, "index_head_dim": 9, "index_topk": 4}
EXPERTS = {
    "n_routed_experts": 7,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
GLM5 = (  # the keys of layers 0, 1, 3 are shared; one weight set predicts two depths
    SPARSE
    | EXPERTS
    | {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 5,
        "index_topk_freq": 2,
        "num_nextn_predict_layers": 1,
        "num_mtp_depths": 2,
    }
)
FAMILIES = {
    "glm4": {},
    "glm5_dense, tied": PLAIN | {"tie_word_embeddings": True},
    "glm4_moe, qk norm": {"model_type": "glm4_moe", "use_qk_norm": True, "num_key_value_heads": 2},
    "glm4_moe, experts": EXPERTS | {"model_type": "glm4_moe", "num_nextn_predict_layers": 1},
    "latent": LATENT,
    "latent, experts": LATENT | EXPERTS,
    "sparse": SPARSE,
    "glm5": GLM5,
}


def random_tensor(size, generator, dtype=torch.float32):
    """Norm weights and biases (one dim) from 0.5 to 1.5, matrices normal."""
    if len(size) == 1:
        return torch.rand(size, generator=generator, dtype=torch.float64).add_(0.5).to(dtype)
    return torch.randn(size, generator=generator, dtype=torch.float64).mul_(0.3).to(dtype)


def random_params(cfg, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    meta = flatten(init_params(cfg, device="meta"))
    return unflatten({path: random_tensor(leaf.shape, generator, dtype) for path, leaf in meta.items()})


def random_batch(cfg, rows=3, steps=9, seed=1):
    """Tokens and targets, a fifth of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, cfg.vocab_size, (rows, steps), generator=generator)
    targets = torch.randint(0, cfg.vocab_size, (rows, steps), generator=generator)
    return {"tokens": tokens, "targets": targets.masked_fill(torch.rand(rows, steps, generator=generator) < 0.2, -100)}


def distance(one, other):
    """The largest norm of a leaf's difference, relative to that leaf's norm."""
    one, other = ({key: leaf.detach() for key, leaf in flatten(tree).items()} for tree in (one, other))
    assert one.keys() == other.keys()
    return max(float((a - other[key]).norm() / (other[key].norm() + 1e-30)) for key, a in one.items())


def targets_ahead(batch, depth):
    """What each position must predict at a depth of multi-token prediction."""
    return prepare(batch, depth, LOCAL).further[-1].targets
