"""Which settings cannot be run, and which would change nothing."""

from .config import ModelConfig
from .settings import HEADS, MeshConfig, RunConfig
from .sources import ROWS
from .typed import ConfigError


def refuse(run: RunConfig) -> None:
    """Raise ConfigError that names every setting that cannot be run, with the equation spelled out."""
    data, optim, mesh = run.data, run.optim, run.mesh
    problems = [*(faults := mesh_faults(mesh, run.model))]

    def need(holds: bool, text: str) -> None:
        if not holds:
            problems.append(text)

    for name in ("seq_len", "global_batch", "micro_batch"):
        value = getattr(data, name)
        need(value >= 1, f"data.{name.replace('_', '-')} ({value}) must be at least 1")
    need(
        len(data.weights) in (0, len(data.path)),
        f"data.weights ({len(data.weights)}) must be as many as data.path ({len(data.path)}), or none",
    )
    need(
        all(0 < weight < float("inf") for weight in data.weights),
        f"data.weights ({', '.join(map(str, data.weights))}) must be finite and above 0",
    )
    taken = [axis for name, axes in run.layout.store.items() if name != "tp" for axis in axes if axis in HEADS]
    need(
        mesh.tp == 1 or not taken,
        f"layout.store ({', '.join(taken)}) must be left to layout.store.tp for mesh.tp "
        f"({mesh.tp}): set it in the config's file",
    )
    need(
        mesh.tp == 1 or {*run.layout.store.get("tp", ())} == {*HEADS},
        f"layout.store.tp ({', '.join(run.layout.store.get('tp', ()))}) must be {', '.join(HEADS)} for mesh.tp "
        f"({mesh.tp}): set it in the config's file",
    )
    need(run.steps >= 1, f"steps ({run.steps}) must be at least 1")
    need(run.seed >= 0, f"seed ({run.seed}) must be at least 0")
    need(run.eval_every >= 0, f"eval-every ({run.eval_every}) must be at least 0")
    need(0 <= data.held_out < 1, f"data.held-out ({data.held_out}) must be at least 0 and below 1")
    need(0 < optim.lr < float("inf"), f"optim.lr ({optim.lr}) must be a finite number above 0")
    need(optim.warmup_steps >= 0, f"optim.warmup-steps ({optim.warmup_steps}) must be at least 0")
    if optim.schedule != "constant":
        need(0 <= optim.min_lr <= optim.lr, f"optim.min-lr ({optim.min_lr}) must be from 0 to optim.lr ({optim.lr})")
        need(
            optim.decay_steps > optim.warmup_steps,
            f"optim.decay-steps ({optim.decay_steps}) must be above optim.warmup-steps ({optim.warmup_steps})",
        )
    for name in ("beta1", "beta2"):
        value = getattr(optim, name)
        need(0 <= value < 1, f"optim.{name} ({value}) must be at least 0 and below 1")
    need(0 < optim.eps < float("inf"), f"optim.eps ({optim.eps}) must be finite and above 0")
    for name in ("weight_decay", "clip"):
        value = getattr(optim, name)
        need(0 <= value < float("inf"), f"optim.{name.replace('_', '-')} ({value}) must be finite and at least 0")
    for name in ("indexer.coef", "router.bias_rate", "router.balance_coef", "router.z_coef", "mtp.coef"):
        group, field = name.split(".")
        value = getattr(getattr(run, group), field)
        need(0 <= value < float("inf"), f"{name.replace('_', '-')} ({value}) must be finite and at least 0")
    need(
        run.indexer.stage == "frozen" or run.model.index_topk > 0,
        f"indexer.stage ({run.indexer.stage}) must be frozen: the model has no indexer (index_topk is 0)",
    )
    need(
        run.indexer.stage == "frozen" or run.indexer.coef > 0,
        f"indexer.coef ({run.indexer.coef}) must be above 0: nothing else trains the indexers",
    )
    need(run.checkpoint.every >= 0, f"checkpoint.every ({run.checkpoint.every}) must be at least 0")
    need(run.checkpoint.keep >= 1, f"checkpoint.keep ({run.checkpoint.keep}) must be at least 1")
    need(run.checkpoint.keep_every >= 0, f"checkpoint.keep-every ({run.checkpoint.keep_every}) must be at least 0")
    need(
        not run.checkpoint.url or "://" in run.checkpoint.url,
        f"checkpoint.url ({run.checkpoint.url}) must be a URL that tensorstore knows, such as gs://bucket/run",
    )
    need(
        data.seq_len <= run.model.max_position_embeddings,
        f"data.seq-len ({data.seq_len}) must be at most the model's max_position_embeddings "
        f"({run.model.max_position_embeddings})",
    )
    rows = mesh.data_ranks * data.micro_batch
    if problems == faults and rows > 0:
        need(
            data.global_batch % rows == 0,
            f"data.global-batch ({data.global_batch}) must be a multiple of data.micro-batch ({data.micro_batch}) x "
            f"mesh.dp-replicate ({mesh.dp_replicate}) x mesh.dp-shard ({mesh.dp_shard}) = {rows}",
        )
    if problems:
        raise ConfigError("; ".join(problems))


def mesh_faults(mesh: MeshConfig, model: ModelConfig) -> list[str]:
    """Why a model cannot be put on a grid."""
    names = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
    sizes = {f"mesh.{name.replace('_', '-')}": getattr(mesh, name) for name in names}
    if wrong := [f"{name} ({value}) must be at least 1" for name, value in sizes.items() if value < 1]:
        return wrong
    shards, experts, problems = mesh.dp_shard * mesh.cp, model.n_routed_experts, []
    if shards % mesh.ep:
        of = f"mesh.dp-shard ({mesh.dp_shard}) x mesh.cp ({mesh.cp}) = {shards}"
        problems.append(f"mesh.ep ({mesh.ep}) must divide {of}")
    if mesh.ep > 1 and (experts == 0 or experts % mesh.ep):
        must = f"must be above 0 and divide evenly over mesh.ep ({mesh.ep}): set it to a divisor"
        problems.append(f"n_routed_experts ({experts}) {must}")
    over = f"must divide evenly over mesh.tp ({mesh.tp}): set it to a divisor"
    return problems + [f"{told} {over}" for told, size in split_sizes(mesh, model).items() if size % mesh.tp]


def split_sizes(mesh: MeshConfig, model: ModelConfig) -> dict[str, int]:
    """The sizes that tp splits, by how they are told. Heads of keys and values too: none of them is on two ranks."""
    routed = model.n_routed_experts > 0
    names = {
        "num_attention_heads": True,
        "num_key_value_heads": model.attention == "gqa",
        "intermediate_size": not routed or model.first_k_dense_replace > 0,
        "moe_intermediate_size": routed and mesh.tp_experts == "ffn",
        "vocab_size": True,
    }
    sizes = {f"{name} ({n})": n for name, split in names.items() if split and (n := getattr(model, name))}
    told = " x ".join(f"{name} ({getattr(model, name)})" for name in ("n_shared_experts", "moe_intermediate_size"))
    return sizes | ({f"{told} = {n}": n} if routed and (n := model.dims["shared_ffn"]) else {})


def idle(run: RunConfig) -> dict[str, str]:
    """The settings that change nothing beside the others, each with what makes it so."""
    data, optim, chat = run.data, run.optim, run.data.kind == "chat"
    fixed, rows = (any(path.endswith(ends) for path in data.path) for ends in ((".safetensors",), ROWS))
    table = {
        "optim.name is sgd": (optim.name == "sgd", "optim.beta1 optim.beta2 optim.eps"),
        "optim.schedule is constant": (optim.schedule == "constant", "optim.min_lr optim.decay_steps"),
        "data.path holds no rows": (not rows, "data.field data.skip_bad"),
        "data.kind is chat": (chat, "data.field data.packing"),
        "data.kind is text": (not chat, "data.template"),
        "data.path holds fixed batches": (
            fixed,
            "data.tokenizer data.held_out data.packing data.control_tokens eval_every",
        ),
        "checkpoint.store is safetensors": (run.checkpoint.store == "safetensors", "checkpoint.url"),
        "mesh.cp is 1": (run.mesh.cp == 1, "mesh.cp_split"),
        "mesh.tp is 1": (run.mesh.tp == 1, "mesh.tp_experts"),
        "data.held-out is 0": (data.held_out == 0, "eval_every"),
        "the model has no experts": (
            not run.model.n_routed_experts,
            "router.bias_rate router.balance_coef router.z_coef mesh.tp_experts",
        ),
        "no layer of the model shares keys": ("shared" not in run.model.indexers, "indexer.teacher"),
        "indexer.stage is frozen": (run.indexer.stage == "frozen", "indexer.coef indexer.teacher"),
        "indexer.stage is dense-warmup": (
            run.indexer.stage == "dense-warmup",
            "router.bias_rate router.balance_coef router.z_coef mtp.share_indices mtp.detach_trunk mtp.detach_head",
        ),
        "the model selects no keys": (not run.model.index_topk, "mtp.share_indices"),
        "the model predicts one further token": (run.model.mtp_depths == 1, "mtp.share_indices"),
        "mtp.coef is 0": (run.mtp.coef == 0, "mtp.share_indices mtp.detach_trunk mtp.detach_head"),
        "the model predicts no further tokens": (
            not run.model.mtp_depths,
            "mtp.coef mtp.share_indices mtp.detach_trunk mtp.detach_head",
        ),
    }
    return {name: why for why, (holds, names) in table.items() if holds for name in names.split()}
