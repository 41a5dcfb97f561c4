"""What `epl plan` says of split taskgraphs: how variables are held, and which tensors are brought into another form."""

from typing import Any, Dict, List


def describe_sharding(whole: Any, plan: Any) -> Dict[str, Any]:
    """The choice for a training run.

    Returns lanes, and by device: variables with their forms and the bytes that a device
    holds, the moves with the bytes that a device sends, and the sums of both.
    """
    from epl.passes.shard.hold import training_sharding
    from epl.planner.sharding.solve import Machine, size_of
    from epl.planner.sharding.strategy import SAME

    sharding = training_sharding(whole, plan)
    group = plan.group
    variables = []
    for name, item in sharding.items.items():
        if item.is_variable:
            form, value = sharding.strategies[name].outputs[0], item.op.outputs[0]
            size = size_of(value._replace(dtype=whole_dtype(whole, name)), SAME, 0)
            held = size * group.largest if form.is_sharded else size
            variables.append({"name": name, "shape": list(value.shape or ()), "form": str(form), "bytes": int(held)})
    moves = []
    for ref, forms in sharding.forms.items():
        for target, source in forms.items():
            sent = sharding.sent(ref, source, target, group)
            if sent:
                moves.append({"tensor": "%s:%d" % ref, "from": str(source), "to": str(target), "bytes": int(sent)})
    return {
        "lanes": plan.lanes,
        "batch": Machine().unknown,
        "variables": variables,
        "moves": moves,
        "held": sum(v["bytes"] for v in variables),
        "sent": sum(m["bytes"] for m in moves),
    }


def whole_dtype(whole: Any, name: str) -> str:
    """The dtype of a variable."""
    import tensorflow.compat.v1 as tf

    return tf.as_dtype(whole.nodes[name].attr("dtype").type).name


def sharding_text(report: Dict[str, Any]) -> List[str]:
    """The lines of the report."""
    lines = ["", "split over %d devices: each holds %d bytes of variables" % (report["lanes"], report["held"])]
    for item in report["variables"]:
        lines.append("  %-10s %s [%s], %d bytes" % (item["form"], item["name"], ", ".join(map(str, item["shape"])), item["bytes"]))
    lines.append("tensors brought into another form (L: each its own batch, R: all of it, S(d): a part along d, P: a term of a sum)")
    for item in report["moves"]:
        lines.append("  %-10s -> %-10s %s, %d bytes sent" % (item["from"], item["to"], item["tensor"], item["bytes"]))
    lines.append("each sends %d bytes a micro-batch, with %d samples where a batch is of unknown size" % (report["sent"], report["batch"]))
    return lines
