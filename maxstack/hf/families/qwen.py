"""Qwen2 and 2.5, Qwen3, Qwen3-MoE; Qwen3-Next and Qwen3.5 (text, dense and MoE): three layers of
gated delta rule to one of gated attention."""

from maxstack.hf.blocks import Layers, Names, Types
from maxstack.hf.families.parts import (
    BIASED,
    EXPERTS,
    GATED,
    KEY_VALUE,
    LLAMA_ROWS,
    OUT,
    OUTER,
    PRE_NORMS,
    WINDOWS,
    Further,
    Table,
    attention,
    block,
    decoder,
    experts,
    full_every,
    gated,
    rms,
    windowed,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.rows import only, rows
from maxstack.hf.table import Case, Key, Sink, Source

SILENT = ("max_window_layers", "sliding_window", "use_sliding_window")
SLIDING = Case("use_sliding_window", {True: Key("sliding_window", 4096)}, False)


def _types(source: Source, layers: int) -> list[str]:
    first = (
        source.get("max_window_layers", 28)
        if source.get("use_sliding_window") and source.get("sliding_window", 4096)
        else layers
    )
    return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]


class Sparse:
    """Every n-th layer is a mixture of experts, but for a list of layers that are not."""

    def read(self, source: Source, layers: int) -> list[str]:
        dense, step = source.get("mlp_only_layers") or (), source.get("decoder_sparse_step", 1)
        return ["dense" if i in dense or (i + 1) % step else "moe" for i in range(layers)]

    def write(self, names: Names, sink: Sink) -> None:
        sink.put("decoder_sparse_step", 1)
        sink.put("mlp_only_layers", [i for i, name in enumerate(names) if name == "dense"])


ORDER = Types(WINDOWS, _types)
ROPES = Rope(), Rope()

QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    decoder(),
    windowed(ORDER, SLIDING, ROPES, {"absent": (32, None), "qkv_bias": True, "out_bias": False}),
    LLAMA_ROWS,
    fixed={"use_mrope": False},
    silent=SILENT,
)

QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    decoder(),
    windowed(ORDER, SLIDING, ROPES, {"absent": (32, 128), "qk_norm": rms(), **BIASED}),
    LLAMA_ROWS,
    silent=SILENT,
)

MIXER = attention(Rope(), (4, None), window=None, qk_norm=rms(), **BIASED)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    decoder(),
    Layers(
        {
            "moe": block(
                MIXER,
                experts(
                    Key("num_experts", other="num_local_experts"),
                    {"score": "softmax", "normalize": Key("norm_topk_prob", False)},
                ),
            ),
            "dense": block(MIXER),
        },
        Sparse(),
    ),
    LLAMA_ROWS + EXPERTS,
    fixed={"use_sliding_window": False, "use_qk_norm": True},
    silent="intermediate_size max_window_layers sliding_window".split(),
)

NORM = rms(zero_centered=True)
DELTA = {
    "kind": "gated_delta",
    "key_heads": Key("linear_num_key_heads"),
    "value_heads": Key("linear_num_value_heads"),
    "key_dim": Key("linear_key_head_dim"),
    "value_dim": Key("linear_value_head_dim"),
    "conv": Key("linear_conv_kernel_dim", 4),
    "norm": rms(),
}
WORDS = {"linear_attention": "linear", "full_attention": "full"}
SHARED = {"hidden": Key("shared_expert_intermediate_size"), "gate": True}
OUTSIDE = decoder(norm=NORM, mtp=Further("full"))

# Full layers alone have norms of queries, and their q_proj holds a gate after each head's query.
FULL_ROWS = only(
    "mixer/query_norm/scale: h",
    KEY_VALUE
    + OUT
    + rows("""
{layer}.self_attn.q_proj.weight | mixer/query: h, mixer/gate: h | (n +) d -> d n +
"""),
)
LINEAR_ROWS = rows("""
{layer}.linear_attn.conv1d.weight | mixer/conv_query: k h, mixer/conv_key: k h, mixer/conv_value: n v | (+) 1 w -> w +
{layer}.linear_attn.A_log         | mixer/a_log      | n
{layer}.linear_attn.dt_bias       | mixer/dt_bias    | n
{layer}.linear_attn.norm.weight   | mixer/norm/scale | v
""") + only(  # noqa: E501
    "mixer/conv_query: w k h",
    rows("{layer}.linear_attn.out_proj.weight | mixer/out | d (n v) -> n v d"),
)
# Qwen3-Next packs projections by key head g, each with its r value heads; Qwen3.5 one after the
# other.
BY_KEY_HEAD = only(
    "mixer/conv_query: w g h",
    rows("""
{layer}.linear_attn.in_proj_qkvz.weight | mixer/query: h, mixer/key: h, mixer/value: r v -> d (g r) v, mixer/gate: r v -> d (g r) v | (g +) d -> d g +
{layer}.linear_attn.in_proj_ba.weight   | mixer/beta: r, mixer/decay: r | (g +) d -> d (g +)
"""),  # noqa: E501
)
ONE_AFTER_THE_OTHER = only(
    "mixer/conv_query: w k h",
    rows("""
{layer}.linear_attn.in_proj_qkv.weight | mixer/query: k h, mixer/key: k h, mixer/value: n v | (+) d -> d +
{layer}.linear_attn.in_proj_z.weight   | mixer/gate  | (n v) d -> d n v
{layer}.linear_attn.in_proj_b.weight   | mixer/beta  | n d -> d n
{layer}.linear_attn.in_proj_a.weight   | mixer/decay | n d -> d n
"""),  # noqa: E501
)
MLP_ROWS = (
    GATED
    + EXPERTS
    + rows("""
{layer}.mlp.shared_expert.gate_proj.weight | mlp/shared/gate | f d -> d f
{layer}.mlp.shared_expert.up_proj.weight   | mlp/shared/up   | f d -> d f
{layer}.mlp.shared_expert.down_proj.weight | mlp/shared/down | d f -> f d
{layer}.mlp.shared_expert_gate.weight      | mlp/shared_gate | 1 d -> d
""")
)
FURTHER_ROWS = rows("""
mtp.pre_fc_norm_embedding.weight | mtp/0/embed_norm/scale  | d
mtp.pre_fc_norm_hidden.weight    | mtp/0/hidden_norm/scale | d
mtp.fc.weight                    | mtp/0/project           | o (two d) -> two d o
mtp.norm.weight                  | mtp/0/norm/scale        | d
""")
COMMON_ROWS = OUTER + PRE_NORMS + FULL_ROWS + LINEAR_ROWS + MLP_ROWS + FURTHER_ROWS


def _layers(mlp: Table, kv_heads: int) -> Layers:
    """Return linear layers with a full one after every three; `kv_heads` is the number where the
    key is absent."""
    full = attention(
        Rope(fraction=0.25),
        (kv_heads, None),
        head_dim=Key("head_dim", 256),
        gate=True,
        qk_norm=NORM,
        **BIASED,
    )
    return Layers(
        {"linear": block(DELTA, mlp, NORM), "full": block(full, mlp, NORM)},
        full_every(4, "full_attention_interval", WORDS),
    )


def _experts(normalize: object) -> Table:
    return experts("num_experts", {"score": "softmax", "normalize": normalize}, shared=SHARED)


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    OUTSIDE,
    _layers(_experts(Key("norm_topk_prob", True)), 2),
    COMMON_ROWS + BY_KEY_HEAD,
    fixed={
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    },
    silent="""
    intermediate_size full_attention_interval sliding_window max_window_layers
    """.split(),
    further="mtp.layers.{}",
)

FIXED = {"attention_bias": False, "attn_output_gate": True, "mtp_use_dedicated_embeddings": False}
SILENT_NEXT = ("full_attention_interval", "mamba_ssm_dtype", "mtp_num_hidden_layers")
QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    OUTSIDE,
    _layers(gated(), 4),
    COMMON_ROWS + ONE_AFTER_THE_OTHER,
    fixed=FIXED,
    silent=SILENT_NEXT,
    further="mtp.layers.{}",
)
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    OUTSIDE,
    _layers(_experts(True), 2),
    COMMON_ROWS + ONE_AFTER_THE_OTHER,
    fixed=FIXED,
    silent=(*SILENT_NEXT, "norm_topk_prob", "intermediate_size"),
    further="mtp.layers.{}",
)
