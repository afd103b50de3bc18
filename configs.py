"""What can be run, by name: MODELS (sizes), LAYOUTS (placements), RUNS (what `train.py --config` takes)."""

from dataclasses import replace

from glm5fn.config import ModelConfig
from glm5fn.settings import CheckpointConfig, DataConfig, Layout, MeshConfig, OptimConfig, RunConfig

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
    rope_theta=1e4,
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
    rope_theta=1e4,
    max_position_embeddings=4096,
)

MODELS = {
    "dense-tiny": TINY,
    "dense-0.5b": ModelConfig(
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
    ),
    "glm4-9b": GLM4_9B,
    "glm4-32b": GLM4_32B,
    "glm4-32b-base": replace(GLM4_32B, max_position_embeddings=131072),
    "glm-z1-9b": GLM4_9B,
    "glm-z1-32b": GLM4_32B,
    "glm-z1-rumination-32b": replace(GLM4_32B, num_key_value_heads=8, max_position_embeddings=131072),
}

# The tensor axes that may be cut to store a part on each rank.
WIDE = ("embed",)

LAYOUTS = {
    "fsdp": Layout(store={"fsdp": WIDE}),
}

DENSE_TINY = RunConfig(
    name="dense-tiny",
    model=MODELS["dense-tiny"],
    layout=LAYOUTS["fsdp"],
    data=DataConfig(seq_len=256, global_batch=8, micro_batch=4),
    optim=OptimConfig(lr=3e-4, min_lr=3e-5, warmup_steps=10, decay_steps=1000),
)
DENSE_HALF_B = RunConfig(
    name="dense-0.5b",
    model=MODELS["dense-0.5b"],
    layout=LAYOUTS["fsdp"],
    data=DataConfig(seq_len=1024, global_batch=4, micro_batch=1),
    optim=OptimConfig(lr=1e-4, min_lr=1e-5, warmup_steps=100, decay_steps=10000),
    precision="bf16",
    recompute="layer",
)
GLM4 = RunConfig(
    name="glm4-9b",
    model=MODELS["glm4-9b"],
    layout=LAYOUTS["fsdp"],
    mesh=MeshConfig(dp_shard=8),
    data=DataConfig(seq_len=8192, global_batch=64, micro_batch=1),
    optim=OptimConfig(lr=1.25e-6, min_lr=1.25e-7, warmup_steps=100, decay_steps=10000, weight_decay=0.1, clip=1.0),
    checkpoint=CheckpointConfig(every=500),
    steps=10000,
    precision="bf16",
    recompute="layer",
)

RUNS = {
    run.name: run
    for run in (
        DENSE_TINY,
        replace(DENSE_TINY, name="dense-dp2", mesh=MeshConfig(dp_shard=2)),
        DENSE_HALF_B,
        replace(DENSE_HALF_B, name="dense-0.5b-dp2", mesh=MeshConfig(dp_shard=2)),
        GLM4,
        replace(GLM4, name="glm4-32b", model=MODELS["glm4-32b"], mesh=MeshConfig(dp_shard=32)),
    )
}
