"""The configuration keys, by section, with their documentation in English and Chinese.

After a change here run `tools/generate_config_docs.py`.
"""

from epl.config_keys import BoolKey, ChoiceKey, DeviceListKey, IntKey, LateChoiceKey, LossScaleKey, NameKey, PositiveKey, Section, ShareListKey


class AutoSection(Section):
    """Automatic parallelisation."""

    _name = "auto"
    _chinese = "自动并行。"

    auto_parallel = BoolKey(
        False,
        "Cut the model into `pipeline.num_stages` pipeline stages automatically, without strategy scopes in the script.",
        "自动把模型切分为流水线阶段，脚本中无需写并行策略的作用域。阶段数由 `pipeline.num_stages` 指定。",
    )


class PipelineSection(Section):
    """Micro-batches, pipeline stages and the order in which a pipeline runs them."""

    _name = "pipeline"
    _chinese = "微批次、流水线阶段，以及流水线的执行顺序。"

    num_stages = IntKey(
        -1,
        "Number of stages that `auto.auto_parallel` cuts the model into; -1 means not set. "
        "Without automatic parallelisation the scopes in the script decide and this key is ignored.",
        "`auto.auto_parallel` 把模型切分成的阶段数；-1 表示未设置。未开启自动并行时，阶段由脚本中的作用域决定，此项不起作用。",
        minimum=1,
        unset=-1,
    )
    num_micro_batch = IntKey(
        1,
        "Micro-batches per replica and training step. The batch size of the script is that of one micro-batch, so in a step each "
        "device of the first stage consumes this many batches. Several stages need several micro-batches to work at the same time; "
        "with one stage the gradients are accumulated.",
        "每个模型副本在一个训练步中处理的微批次数。脚本里的批大小是一个微批次的大小，因此第一阶段的每个设备每步会消费这么多个批次。"
        "有多个阶段时，需要多个微批次才能让各阶段同时工作；只有一个阶段时则做梯度累积。",
        minimum=1,
    )
    strategy = NameKey(
        "PreferBackward",
        ("PreferBackward", "PreferForward", "PreferBackwardOptimizer", "Interleaved", "ZeroBubbleH1", "ZeroBubbleH2", "ZeroBubbleV"),
        "Order of the micro-batches in a pipeline. `PreferBackward` (1F1B) starts a backward pass as soon as it can and keeps "
        "few activations; `PreferForward` (GPipe) runs all forward passes first and keeps all of them; `PreferBackwardOptimizer` "
        "lets the stages before the last run further ahead than `PreferBackward`. `Interleaved` puts several stages on each device, which "
        "makes bubbles shorter; the zero-bubble schedules fill bubbles with the weights' part of the backward pass: `ZeroBubbleH1` with the "
        "memory of `PreferBackward`, `ZeroBubbleH2` with up to twice as much, `ZeroBubbleV` with two stages on each device. "
        "Upper and lower case are the same.",
        "流水线中微批次的执行顺序。`PreferBackward`（1F1B）尽早开始反向计算，需要保存的激活值少；`PreferForward`（GPipe）"
        "先完成全部前向计算，需要保存全部激活值；`PreferBackwardOptimizer` 允许最后一个阶段之前的各阶段比 `PreferBackward` 领先更多。"
        "`Interleaved` 在每个设备上放多个阶段，使气泡更短；零气泡调度用反向计算中求权重梯度的部分填充气泡：`ZeroBubbleH1` 的内存与 "
        "`PreferBackward` 相同，`ZeroBubbleH2` 至多为其两倍，`ZeroBubbleV` 在每个设备上放两个阶段。不区分大小写。",
    )
    stages_per_device = IntKey(
        1,
        "Stages that each device of a replica holds, for the schedules `Interleaved` (any number) and `ZeroBubbleV` (always 2). With 1, "
        "`Interleaved` puts as many stages on a device as it takes for one replica to fit on all devices.",
        "模型副本的每个设备持有的阶段数，用于 `Interleaved`（任意个）和 `ZeroBubbleV`（总是 2 个）调度。为 1 时，`Interleaved` "
        "会在每个设备上放足够多的阶段，使一个副本能放进全部设备。",
        minimum=1,
    )
    accumulate_in_run = BoolKey(
        False,
        "With one stage and several micro-batches: take all of them within one run of the training op. "
        "Off, each run takes one, and every `pipeline.num_micro_batch`-th run updates the variables. "
        "Pipelines and split taskgraphs always take all in one run.",
        "仅有一个阶段且有多个微批次时：在训练算子的一次运行内处理全部微批次。关闭时每次运行处理一个，每运行 "
        "`pipeline.num_micro_batch` 次更新一次变量。多阶段流水线和拆分的 taskgraph 总是在一次运行内处理全部微批次。",
    )


class GradientCheckpointSection(Section):
    """Recomputation: activations are dropped in the forward pass and computed again in the backward pass."""

    _name = "gradient_checkpoint"
    _chinese = "重计算：前向计算后丢弃激活值，反向计算时重新计算。"

    type = ChoiceKey(
        "",
        ("", "collection", "auto"),
        "Which tensors are kept: those the script adds to the collection `checkpoints` (`collection`), or ones that EPL picks (`auto`). "
        "Empty turns recomputation off. It saves memory and costs about one more forward pass.",
        "保留哪些张量：脚本加入 `checkpoints` 集合的张量（`collection`），或由 EPL 自动选择（`auto`）。空字符串表示关闭。"
        "重计算节省显存，代价约为多做一次前向计算。",
    )
    end_taskgraph = IntKey(
        -1,
        "With type `auto`: index of the last taskgraph that recomputes, counted from 0; -1 means all. "
        "The last stages of a pipeline hold few activations and gain little from recomputation.",
        "类型为 `auto` 时：最后一个做重计算的 taskgraph 的序号，从 0 开始；-1 表示全部。流水线靠后的阶段保存的激活值少，重计算的收益也小。",
        minimum=0,
        unset=-1,
    )
    memory_limit = IntKey(
        0,
        "With type `auto`: megabytes (10^6 bytes) that the activations of a device may take. As few layers as possible are computed again; "
        "0 keeps as little as possible. It needs static shapes, a fixed batch size among them.",
        "类型为 `auto` 时：一个设备上的激活值可占用的内存，单位 MB（10^6 字节）。在此限制内尽量少做重计算；0 表示保留尽可能少的激活值。"
        "需要静态形状，包括固定的批大小。",
        minimum=0,
    )
    check_gradients = BoolKey(
        False,
        "Compute the gradients also without recomputation and compare the two. For debugging: it takes the memory that recomputation saves.",
        "同时计算不做重计算的梯度并加以比较。仅供调试：重计算省下的显存会被重新占用。",
    )


class ZeroSection(Section):
    """Partitioning of training state over the replicas (ZeRO)."""

    _name = "zero"
    _chinese = "在模型副本之间切分训练状态（ZeRO）。"

    level = LateChoiceKey(
        "",
        ("", "v0", "v1", "v2"),
        "What each replica holds only its share of: weights between steps and optimizer states (`v0`), also the sums of gradients (`v1`), "
        "also weights during a step (`v2`). Empty turns it off. It saves memory with data parallelism and costs communication.",
        "每个副本只保存自己那一份的内容：训练步之间的权重和优化器状态（`v0`），加上梯度之和（`v1`），再加上训练步内的权重（`v2`）。空字符串表示关闭。"
        "适用于数据并行以节省显存，但会增加通信量。",
    )


class OffloadSection(Section):
    """Use of host memory."""

    _name = "offload"
    _chinese = "使用主机内存。"

    level = ChoiceKey(
        "",
        ("", "v0", "v1", "v2"),
        "`v0` keeps all weights, and with them the optimizer states, in host memory and copies weights to the device when they are used; `v1` is "
        "the same; with `v2` activations also wait there between the forward and the backward part. Empty turns it off. It makes larger models "
        "fit, at the price of copies in every step.",
        "`v0` 把全部权重连同优化器状态放在主机内存中，使用权重时再复制到设备；`v1` 与之相同；`v2` 还把激活值在前向与反向之间放在主机内存中。"
        "空字符串表示关闭。可以容纳更大的模型，代价是每步都有数据复制。",
    )


class AmpSection(Section):
    """Automatic mixed precision."""

    _name = "amp"
    _chinese = "自动混合精度。"

    level = ChoiceKey(
        "",
        ("", "o1"),
        "`o1` computes the operations that are safe in half precision in `amp.dtype` and leaves the variables in float32. Empty turns it off. "
        "It changes results within the accuracy of half precision.",
        "`o1` 对适合半精度的算子使用 `amp.dtype` 计算，变量仍为 float32。空字符串表示关闭。结果会有半精度范围内的差异。",
    )
    dtype = ChoiceKey(
        "float16",
        ("float16", "bfloat16"),
        "`float16`, or `bfloat16`, which has the range of float32, so that gradients do not overflow, but fewer digits.",
        "半精度的类型：`float16` 或 `bfloat16`。后者的数值范围与 float32 相同，梯度不会溢出，但有效位更少。",
    )
    debug_log = BoolKey(
        False,
        "Log how many operations of each type compute in half precision and how many in float32, skipped steps, and changes of the loss scale.",
        "在日志中记录各类算子使用半精度和 float32 的数量、被跳过的训练步，以及损失缩放系数的变化。",
    )
    loss_scale = LossScaleKey(
        "dynamic",
        "Factor on the loss that keeps small gradients above the fp16 range. `dynamic` adapts it and skips a step whose gradients overflow; "
        "a number is a fixed factor. Used only with `amp.level`.",
        "损失的缩放系数，避免过小的梯度在 fp16 下变为 0。`dynamic` 表示自动调整，并跳过梯度溢出的训练步；"
        "数字表示固定系数。仅在设置 `amp.level` 时有效。",
    )


class ClusterSection(Section):
    """Devices, their layout, and how long a stalled job lives."""

    _name = "cluster"
    _chinese = "设备、设备布局，以及作业停滞时的等待时间。"

    device_place_prefer_intra_node = BoolKey(
        True,
        "Place the devices of one model replica within one node where possible, so that stages and shards talk over the fast links. "
        "Off, a replica spreads over nodes and the gradients stay within a node.",
        "尽可能把一个模型副本的设备放在同一节点内，使阶段之间、分片之间走高速互连。关闭时副本跨节点放置，而梯度通信留在节点内。",
    )
    run_visible_devices = DeviceListKey(
        "",
        "Numbers of the GPUs that this process's session may use, separated by commas; empty means all. "
        "Usually the scheduler of a shared machine sets it. Ranks may differ.",
        "本进程的会话可以使用的 GPU 编号，以逗号分隔；空字符串表示全部。通常由共享机器的调度系统设置。各进程的取值可以不同。",
        per_rank=True,
    )
    colocate_split_and_replicate = BoolKey(
        False,
        "Let all taskgraphs share all devices instead of giving each its own. "
        "For models that mix `split` and `replicate` layers, such as a mixture of experts.",
        "让所有 taskgraph 共享全部设备，而不是各自使用不同的设备。用于混合使用 `split` 和 `replicate` 的模型，例如混合专家模型（MoE）。",
    )
    split_shares = ShareListKey(
        "",
        "How much of what is split each device of a group gets, one weight a device: with `2,1` the first one gets two thirds. "
        "Empty means equal parts.",
        "每组中各设备分得的 `split` 份额，每个设备一个权重：`2,1` 表示第一个设备分得三分之二。空字符串表示均分。",
    )
    batch_shares = ShareListKey(
        "",
        "How much of a step's samples each replica takes, one weight a replica: with `2,1` the first one takes two thirds. For unequal devices. "
        "What is fed to a process is divided so, batches of datasets are cut anew, and every sample counts alike. Empty means equal parts.",
        "每一步中各副本处理的样本份额，每个副本一个权重：`2,1` 表示第一个副本处理三分之二。用于性能不同的设备。"
        "馈入进程的数据按此划分，数据集的批次按此重新切分，每个样本的权重相同。空字符串表示均分。",
    )
    devices_per_worker = IntKey(
        0,
        "Number of devices of this process. 0 means all visible GPUs, or one CPU when there is none; "
        "on a machine without GPUs, K means K virtual CPU devices. Ranks may differ.",
        "本进程的设备数。0 表示使用全部可见 GPU，没有 GPU 时使用一个 CPU；在没有 GPU 的机器上，K 表示 K 个虚拟 CPU 设备。各进程的取值可以不同。",
        minimum=0,
        per_rank=True,
    )
    stall_timeout = PositiveKey(
        60.0,
        "Seconds until a job of several processes in which nothing moves, or whose ranks run different things, ends with an error. "
        "A rank that is busy elsewhere, for instance with an evaluation, does not count as stalled.",
        "多进程作业停滞，或各进程执行的内容不一致时，经过多少秒后报错退出。正忙于其他工作（例如评估）的进程不算停滞。",
    )


class CommunicationSection(Section):
    """Aggregation of gradients and statistics over replicas."""

    _name = "communication"
    _chinese = "副本之间梯度和统计量的聚合。"

    num_communicators = IntKey(
        2,
        "Number of communicators that work in parallel. More of them overlap more transfers and take more device memory for buffers.",
        "并行工作的通信器数量。数量越多，可同时进行的传输越多，缓冲区占用的设备内存也越多。",
        minimum=1,
    )
    sparse_as_dense = BoolKey(
        False,
        "Turn sparse gradients (of embeddings) into dense ones before they are aggregated. "
        "Faster only when a step touches most rows of the table.",
        "聚合之前把（嵌入表的）稀疏梯度转换为稠密梯度。仅当每步会用到嵌入表的大部分行时才更快。",
    )
    max_splits = IntKey(
        5,
        "Largest number of groups that gradients are fused into for communication. "
        "Fewer groups mean fewer and larger messages; more groups start earlier in the backward pass.",
        "通信时梯度最多融合成多少组。组少则消息少而大；组多则可以在反向计算中更早开始通信。",
        minimum=1,
    )
    fp16 = BoolKey(
        False,
        "Send gradients as fp16. It halves the traffic and loses precision, so results differ from training without it.",
        "以 fp16 传输梯度。通信量减半，但会损失精度，训练结果与不开启时不同。",
    )
    fp16_scale = PositiveKey(
        128.0,
        "With `communication.fp16`: gradients are multiplied by this number before the conversion to fp16 and divided by it afterwards. "
        "Raise it when small gradients vanish, lower it when large ones overflow.",
        "开启 `communication.fp16` 时：梯度转换为 fp16 之前先乘以该值，聚合之后再除以该值。小梯度变为 0 时调大，大梯度溢出时调小。",
    )
    clip_after_allreduce = BoolKey(
        False,
        "Always aggregate before the script clips gradients, whatever `communication.aggregate_at` says. "
        "It matters for scripts that were written for `apply`.",
        "无论 `communication.aggregate_at` 取何值，总是先聚合，再由脚本裁剪梯度。对按 `apply` 方式编写的脚本有意义。",
    )
    aggregate_at = ChoiceKey(
        "raw",
        ("raw", "apply"),
        "Which gradients are aggregated: those that `tf.gradients` returns (`raw`), so that clipping sees the global gradient, "
        "or those given to `apply_gradients` (`apply`), so that each replica clips its own.",
        "聚合哪一处的梯度：`tf.gradients` 的返回值（`raw`），此时裁剪作用于全局梯度；"
        "或传给 `apply_gradients` 的梯度（`apply`），此时每个副本各自裁剪。",
    )
    gradients_reduce_method = ChoiceKey(
        "mean",
        ("mean", "sum"),
        "How the gradients of replicas are combined. `mean` trains like one device on the whole global batch; "
        "`sum` adds the gradients up, so the learning rate must fit the number of replicas.",
        "副本之间梯度的合并方式。`mean` 等价于单设备在整个全局批次上训练；`sum` 把梯度相加，学习率需要与副本数相适应。",
    )
    statistics_reduce = ChoiceKey(
        "mean",
        ("mean", "first"),
        "How variables that the forward pass updates, such as the moving statistics of batch normalisation, are combined over replicas: "
        "their `mean`, or the value of the `first` replica.",
        "前向计算中更新的变量（例如批归一化的滑动统计量）在副本之间的合并方式：取平均值（`mean`），或取第一个副本的值（`first`）。",
    )
    sync_batch_norm = BoolKey(
        False,
        "Batch normalisation in training takes mean and variance over the batches of all replicas, as plain training on the global batch does. "
        "It costs two small all-reduces per layer and direction.",
        "训练时批归一化的均值和方差在所有副本的批次上计算，与单设备在全局批次上训练一致。每层每个方向多两次小的 all-reduce。",
    )


class IoSection(Section):
    """Division of the input files among the workers."""

    _name = "io"
    _chinese = "在各 worker 之间分配输入文件。"

    slicing = BoolKey(
        False,
        "Deal the input files out to the workers, in proportion to their replicas. Off, each worker reads all files. "
        "If they can't be divided exactly, each worker reads all files, unless one of the next two keys says otherwise.",
        "按各 worker 的副本数按比例分配输入文件。关闭时每个 worker 读取全部文件。文件无法整除时，每个 worker 都读取全部文件，除非下面两项另有指定。",
    )
    unbalanced_io_slicing = BoolKey(
        False,
        "With `io.slicing`: deal out files that can't be divided exactly, so that some workers get more than their share. "
        "An epoch ends everywhere when the first worker runs out of data.",
        "开启 `io.slicing` 时：文件无法整除也照样分配，部分 worker 会多分到文件。最先读完数据的 worker 决定所有 worker 的轮次结束。",
    )
    drop_last_files = BoolKey(
        False,
        "With `io.slicing`: leave out the last files that can't be divided exactly. Their data is not trained on.",
        "开启 `io.slicing` 时：舍弃末尾无法整除的文件，其中的数据不参与训练。",
    )


class OptimizerSection(Section):
    """The update of the variables."""

    _name = "optimizer"
    _chinese = "变量的更新。"

    num_apply_group = IntKey(
        1,
        "Number of groups in which the optimizer updates the variables, one after the other. "
        "More groups lower the peak of temporary memory of optimizers with large intermediate values.",
        "优化器分成多少组依次更新变量。对中间结果较大的优化器，组数越多，临时内存的峰值越低。",
        minimum=1,
    )


SECTIONS = (
    AutoSection,
    PipelineSection,
    GradientCheckpointSection,
    ZeroSection,
    OffloadSection,
    AmpSection,
    ClusterSection,
    CommunicationSection,
    IoSection,
    OptimizerSection,
)
