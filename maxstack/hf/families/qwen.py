"""Qwen2 and 2.5, Qwen3, Qwen3-MoE."""

from maxstack.hf.blocks import Layers, Names, Types
from maxstack.hf.families.parts import (
    BIASED,
    EXPERTS,
    LLAMA_ROWS,
    WINDOWS,
    attention,
    block,
    decoder,
    experts,
    rms,
    windowed,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
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
    windowed(ORDER, SLIDING, ROPES, {"qkv_bias": True, "out_bias": False}),
    LLAMA_ROWS,
    fixed={"use_mrope": False},
    silent=SILENT,
)

QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    decoder(),
    windowed(ORDER, SLIDING, ROPES, {"qk_norm": rms(), **BIASED}),
    LLAMA_ROWS,
    silent=SILENT,
)

MIXER = attention(Rope(), window=None, qk_norm=rms(), **BIASED)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    decoder(),
    Layers(
        {
            "moe": block(
                MIXER,
                experts(
                    Key("num_experts", lambda source: source.need("num_local_experts")),
                    {"score": "softmax", "normalize": Key("norm_topk_prob", False)},
                ),
            ),
            "dense": block(MIXER),
        },
        Sparse(),
    ),
    LLAMA_ROWS + EXPERTS,
    fixed={"use_sliding_window": False},
    silent="intermediate_size max_window_layers sliding_window".split(),
)
