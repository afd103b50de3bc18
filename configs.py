"""What can be run, by name: MODELS (sizes), LAYOUTS (placements), RUNS (what `train.py --config` takes)."""

from dataclasses import replace
from pathlib import Path

from glm5fn.config import ModelConfig
from glm5fn.settings import (
    FSDP,
    CheckpointConfig,
    DataConfig,
    IndexerConfig,
    MeshConfig,
    OptimConfig,
    RouterConfig,
    RunConfig,
)

GLM4_9B = ModelConfig(
    model_type="glm4",
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    attention_bias=True,
    partial_rotary_factor=0.5,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    initializer_range=0.01,
    eos_token_id=(151329, 151336, 151338),
    pad_token_id=151329,
)
GLM4_32B = replace(
    GLM4_9B,
    hidden_size=6144,
    intermediate_size=23040,
    num_hidden_layers=61,
    num_attention_heads=48,
    attention_bias=False,
)
TINY = ModelConfig(
    model_type="glm5_dense",
    vocab_size=320,  # 256 bytes and the end of document, rounded up
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
)
# Shapes: docs.nvidia.com/nemo/megatron-bridge/latest/models/llm/glm45.html; what it leaves out is as in config.json of
# zai-org/GLM-4.7 and PrimeIntellect/INTELLECT-3-Base (GLM-4.5-Air) on huggingface.co, and in slime's
# scripts/models/glm4.5-355B-A32B.sh and glm4.5-106B-A12B.sh.
GLM45_355B = replace(
    GLM4_9B,
    model_type="glm4_moe",
    hidden_size=5120,
    intermediate_size=12288,
    num_hidden_layers=92,
    num_attention_heads=96,
    num_key_value_heads=8,
    use_qk_norm=True,
    n_routed_experts=160,
    num_experts_per_tok=8,
    n_shared_experts=1,
    moe_intermediate_size=1536,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    rope_theta=1e6,
    max_position_embeddings=131072,
    initializer_range=0.02,
)
GLM45_AIR = replace(
    GLM45_355B,
    hidden_size=4096,
    intermediate_size=10944,
    num_hidden_layers=46,
    use_qk_norm=False,
    n_routed_experts=128,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    routed_scaling_factor=1.0,
)
# Shapes: the key lists in tests/keys; ids and theta as in config.json of amd/GLM-5-MXFP4 on huggingface.co.
GLM5 = ModelConfig(
    model_type="glm_moe_dsa",
    vocab_size=154880,
    hidden_size=6144,
    intermediate_size=12288,
    num_hidden_layers=78,
    num_attention_heads=64,
    attention="mla",
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_topk=2048,
    index_n_heads=32,
    index_head_dim=128,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    num_mtp_depths=3,  # GLM-5 trains three depths on its one weight set
    rope_theta=1e6,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
    eos_token_id=(154820, 154827, 154829),
    pad_token_id=154820,
)

# From the dense model to GLM-5, a step each: experts, latent attention, sparse attention, further tokens.
TINY_MOE = replace(
    TINY,
    num_hidden_layers=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=128,
    first_k_dense_replace=1,
)
TINY_MLA = replace(
    TINY_MOE,
    attention="mla",
    num_key_value_heads=0,
    head_dim=0,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
TINY_DSA = replace(TINY_MLA, model_type="glm_moe_dsa", index_topk=32, index_n_heads=4, index_head_dim=32)
TINY_MTP = replace(TINY_DSA, num_nextn_predict_layers=1)
TINY_GLM5 = replace(
    TINY_MTP,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=12,
    num_attention_heads=4,
    moe_intermediate_size=96,
    first_k_dense_replace=3,
    index_topk_freq=4,
    index_skip_topk_offset=3,
    num_mtp_depths=3,
)
# About 0.5B parameters active for a token, the tied embedding included, in each of them.
HALF_B = ModelConfig(
    model_type="glm5_dense",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    rope_theta=5e5,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
HALF_B_MOE = replace(
    HALF_B,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=2,
    moe_intermediate_size=768,
    first_k_dense_replace=2,
)
HALF_B_MLA = replace(
    HALF_B_MOE,
    attention="mla",
    num_key_value_heads=0,
    head_dim=0,
    q_lora_rank=512,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
)
HALF_B_DSA = replace(HALF_B_MLA, model_type="glm_moe_dsa", index_topk=512, index_n_heads=8, index_head_dim=64)
HALF_B_MTP = replace(HALF_B_DSA, num_nextn_predict_layers=1)

MODELS = {
    "dense-tiny": TINY,
    "moe-tiny": TINY_MOE,
    "mla-tiny": TINY_MLA,
    "dsa-tiny": TINY_DSA,
    "mtp-tiny": TINY_MTP,
    "glm5-tiny": TINY_GLM5,
    "sft-tiny": replace(TINY_GLM5, vocab_size=288, eos_token_id=(256, 260, 262)),  # by examples/chat/tokenizer.json
    "dense-0.5b": HALF_B,
    "moe-0.5b": HALF_B_MOE,
    "mla-0.5b": HALF_B_MLA,
    "dsa-0.5b": HALF_B_DSA,
    "mtp-0.5b": HALF_B_MTP,
    "glm4-9b": GLM4_9B,
    "glm4-32b": GLM4_32B,
    "glm4-32b-base": replace(GLM4_32B, max_position_embeddings=131072),
    "glm-z1-9b": GLM4_9B,
    "glm-z1-32b": GLM4_32B,
    "glm-z1-rumination-32b": replace(GLM4_32B, num_key_value_heads=8, max_position_embeddings=131072),
    "glm4.5-355b": GLM45_355B,
    "glm4.5-air-106b": GLM45_AIR,
    "glm5-744b": GLM5,
    "glm5.1-744b": GLM5,
    "glm5.2-744b": replace(
        GLM5, index_topk_freq=4, index_skip_topk_offset=3, rope_theta=8e6, max_position_embeddings=1048576
    ),
}

LAYOUTS = {"fsdp": FSDP}

DENSE_TINY = RunConfig(
    name="dense-tiny",
    model=MODELS["dense-tiny"],
    layout=LAYOUTS["fsdp"],
    data=DataConfig(seq_len=256, global_batch=8, micro_batch=4),
    optim=OptimConfig(lr=3e-4, min_lr=3e-5, warmup_steps=10, decay_steps=1000),
)
MOE_TINY = replace(DENSE_TINY, router=RouterConfig(bias_rate=0.01))  # evens the loads out within a hundred steps
DENSE_HALF_B = RunConfig(
    name="dense-0.5b",
    model=MODELS["dense-0.5b"],
    layout=LAYOUTS["fsdp"],
    data=DataConfig(seq_len=1024, global_batch=4, micro_batch=1),
    optim=OptimConfig(lr=1e-4, min_lr=1e-5, warmup_steps=100, decay_steps=10000),
    precision="bf16",
    recompute="layer",
)
WARMUP, SPARSE = IndexerConfig(stage="dense-warmup"), IndexerConfig(stage="sparse")
GLM5_RUN = RunConfig(
    name="glm5-744b",
    model=MODELS["glm5-744b"],
    layout=LAYOUTS["fsdp"],
    mesh=MeshConfig(dp_shard=256, ep=32),
    data=DataConfig(seq_len=4096, global_batch=256, micro_batch=1),
    optim=OptimConfig(lr=1e-5, min_lr=1e-6, warmup_steps=100, decay_steps=10000),
    indexer=SPARSE,
    checkpoint=CheckpointConfig(every=500),
    steps=10000,
    precision="bf16",
    recompute="layer",
)
GLM4 = replace(
    DENSE_HALF_B,
    name="glm4-9b",
    model=MODELS["glm4-9b"],
    mesh=MeshConfig(dp_shard=8),
    data=DataConfig(seq_len=8192, global_batch=64, micro_batch=1),
    optim=OptimConfig(lr=1.25e-6, min_lr=1.25e-7, warmup_steps=100, decay_steps=10000, weight_decay=0.1, clip=1.0),
    checkpoint=CheckpointConfig(every=500),
    steps=10000,
)

CHAT = str(Path(__file__).parent / "examples" / "chat")
CHATS = DataConfig(path=(f"{CHAT}/chat.jsonl",), kind="chat", tokenizer=CHAT, seq_len=512, global_batch=4)
# What `python -m glm5fn prepare TEXTS --out prepared` made of any texts, by bytes.
PREPARED = DataConfig(path=("prepared",), packing="best-fit", seq_len=256, global_batch=8, micro_batch=4)
SHORT = DataConfig(seq_len=128, global_batch=8, micro_batch=4)

RUNS = {
    run.name: run
    for run in (
        DENSE_TINY,
        DENSE_HALF_B,
        *(replace(MOE_TINY, name=name, model=MODELS[name]) for name in ("moe-tiny", "mla-tiny")),
        *(replace(MOE_TINY, name=name, model=MODELS[name], indexer=SPARSE) for name in ("dsa-tiny", "mtp-tiny")),
        replace(MOE_TINY, name="glm5-tiny", model=MODELS["glm5-tiny"], indexer=SPARSE, data=SHORT),
        replace(MOE_TINY, name="dsa-warmup-tiny", model=MODELS["dsa-tiny"], indexer=WARMUP),
        *(replace(DENSE_HALF_B, name=name, model=MODELS[name]) for name in ("moe-0.5b", "mla-0.5b")),
        *(replace(DENSE_HALF_B, name=name, model=MODELS[name], indexer=SPARSE) for name in ("dsa-0.5b", "mtp-0.5b")),
        replace(MOE_TINY, name="sft-tiny", model=MODELS["sft-tiny"], indexer=SPARSE, data=CHATS),
        replace(MOE_TINY, name="pretrain", model=MODELS["glm5-tiny"], indexer=SPARSE, data=PREPARED),
        GLM4,
        replace(GLM4, name="glm4-32b", model=MODELS["glm4-32b"], mesh=MeshConfig(dp_shard=32)),
        GLM5_RUN,
        replace(GLM5_RUN, name="glm5.2-744b", model=MODELS["glm5.2-744b"]),
    )
}
GRIDS = {
    "dense-dp2": ("dense-tiny", MeshConfig(dp_shard=2)),
    "dense-0.5b-dp2": ("dense-0.5b", MeshConfig(dp_shard=2)),
    "moe-ep2": ("moe-tiny", MeshConfig(dp_shard=2, ep=2)),
    "dsa-cp2": ("dsa-tiny", MeshConfig(cp=2)),
    "glm5-dp2-ep2": ("glm5-tiny", MeshConfig(dp_shard=2, ep=2)),
    "glm5-cp2-ep2": ("glm5-tiny", MeshConfig(cp=2, ep=2)),
    "dense-tp2": ("dense-tiny", MeshConfig(tp=2)),
    "glm5-tp2": ("glm5-tiny", MeshConfig(tp=2)),
    "glm4-9b-tp2": ("glm4-9b", MeshConfig(dp_shard=4, tp=2)),
    "glm4-32b-tp2": ("glm4-32b", MeshConfig(dp_shard=16, tp=2)),  # as many as there are key and value heads
}
RUNS |= {name: replace(RUNS[base], name=name, mesh=mesh) for name, (base, mesh) in GRIDS.items()}
