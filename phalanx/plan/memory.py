"""temporary"""

from phalanx.plan.model import ModelShape


def rank_memory(model, gpu, layout, goal, attention="flash"):
    G = 2**30
    tp, pp = layout.tp, layout.pp
    P = model.parameters / (tp * pp)
    sh = layout.dp_shard * layout.cp
    st = layout.stage
    if isinstance(model, ModelShape):
        tok = layout.micro_batch * goal.seq_len / layout.cp
        per = {"none": 34, "selective": 20, "full": 2}[layout.recompute] * tok * model.hidden / tp
        act = per * model.layers / pp * min(pp, layout.accumulation(goal.global_batch))
        logits = tok * model.vocab / tp * 10
    else:
        act = layout.micro_batch * model.activation_bytes_per_sample
        logits = 0
    return {
        "all": dict(
            parameters=2 * P / (sh if st == 3 else 1) / G,
            gradients=2 * P / (sh if st >= 2 else 1) / G,
            optimizer=12 * P / (sh if st >= 1 else 1) / G,
            activations=act / G,
            logits=logits / G,
            communication=0.5,
            reserve=gpu.reserve_gib,
        )
    }
