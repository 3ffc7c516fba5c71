"""Vision transformers: ViT, DINOv2, DINOv3, the vision part of SigLIP."""

import dataclasses
from typing import Any

from maxstack.hf.blocks import Layers
from maxstack.hf.families import parts
from maxstack.hf.families.parts import SILU, Table, Times, block
from maxstack.hf.family import CLASSIFYING, Family
from maxstack.hf.rows import Row, modules, only, rows, without
from maxstack.hf.table import Case, Derived, Key, Mismatch, Sink, Source
from maxstack.schema.encoder import EncoderConfig


class Labels:
    """Classes of the head, where the architecture has one."""

    def read(self, source: Source) -> int | None:
        labels = source.get("id2label")
        return (len(labels) if labels else 2) if classifies(source) else None

    def write(self, value: Any, sink: Sink) -> None:
        if value:
            names = {str(i): f"LABEL_{i}" for i in range(value)}
            sink |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


@dataclasses.dataclass(frozen=True)
class WithHead:
    """One value where the architecture has a head, another where not."""

    head: Any
    bare: Any

    def read(self, source: Source) -> Any:
        return self.head if classifies(source) else self.bare

    def write(self, value: Any, sink: Sink) -> None:
        pass  # reading back what was written checks it


class SwiGLU:
    """Hidden size of DINOv2's gated MLP: two thirds of mlp_ratio times the width, rounded up to a
    multiple of 8."""

    def read(self, source: Source) -> int:
        return self.size(source.need("hidden_size"), source.need("mlp_ratio"))

    def write(self, value: Any, sink: Sink) -> None:
        width = sink["hidden_size"]
        # The size is rounded twice, so the ratio cannot be computed from it and is searched.
        fitting = (ratio for ratio in range(1, 65) if self.size(width, ratio) == value)
        ratio = next(fitting, None)
        if ratio is None:
            raise Mismatch(f"{value} is two thirds of no multiple of hidden_size={width}")
        sink.put("mlp_ratio", ratio)

    @staticmethod
    def size(width: int, ratio: float) -> int:
        """The hidden size."""
        return -(-int(int(width * ratio) * 2 / 3) // 8) * 8


def classifies(source: Source) -> bool:
    """True where config.json names an architecture with a head."""
    names = source.get("architectures") or [""]
    return isinstance(names, list) and str(names[0]).endswith(CLASSIFYING)


def norm(eps: float) -> Table:
    """A LayerNorm."""
    return {
        "kind": "layer",
        "eps": Key("layer_norm_eps", eps),
        "scale": True,
        "zero_centered": False,
        "bias": True,
    }


def encoder(eps: float, **more: Any) -> Table:
    """Everything around the layers."""
    return {
        "kind": "encoder",
        "image_size": Key("image_size", 224),
        "patch": Key("patch_size", 16),
        "channels": Key("num_channels", 3),
        "embed": Key("hidden_size"),
        "norm": norm(eps),
        "cls": True,
        "registers": 0,
        "positions": "learned",
        "mask_token": False,
        "pool": {"kind": "cls"},
        "classes": Labels(),
        **more,
    }


def attention(**more: Any) -> Table:
    """Attention over all patches."""
    heads = Derived(lambda source: source.need("num_attention_heads"))
    size = Derived(lambda source: source.need("hidden_size") // source.need("num_attention_heads"))
    return {
        "kind": "attention",
        "causal": False,
        "heads": Key("num_attention_heads"),
        "kv_heads": heads,
        "head_dim": size,
        "rope": None,
        "qkv_bias": True,
        "out_bias": True,
        **more,
    }


def dense(hidden: Any = "intermediate_size", activation: str = "gelu") -> Table:
    """An MLP of one hidden layer."""
    return {
        "kind": "dense",
        "hidden": Key(hidden) if isinstance(hidden, str) else hidden,
        "activation": Key("hidden_act", activation, words=SILU),
        "bias": True,
    }


LAYER_MODULES = modules("""
{layer}.attention.attention.query | mixer/query | (n h) d -> d n h
{layer}.attention.attention.key   | mixer/key   | (n h) d -> d n h
{layer}.attention.attention.value | mixer/value | (n h) d -> d n h
{layer}.attention.output.dense    | mixer/out   | d (n h) -> n h d
""")
FC = modules("""
{layer}.mlp.fc1 | mlp/up   | f d -> d f
{layer}.mlp.fc2 | mlp/down | d f -> f d
""")
SCALED = modules("""
{layer}.norm1 | mixer_norm | d
{layer}.norm2 | mlp_norm   | d
""") + rows("""
{layer}.layer_scale1.lambda1 | mixer_scale | d
{layer}.layer_scale2.lambda1 | mlp_scale   | d
""")


def outer(body: str) -> tuple[Row, ...]:
    """Patches, positions, the last norm and the classifier of ViT and DINOv2."""
    tables = rows(f"""
{body}.embeddings.cls_token           | cls       | 1 1 d -> d
{body}.embeddings.position_embeddings | positions | 1 t d -> t d
""")
    return tables + modules(f"""
{body}.embeddings.patch_embeddings.projection | patch | d c p q -> p q c d
{body}.layernorm                              | norm  | d
classifier                                    | head  | k f -> f k
""")


DROPOUT = """
attention_probs_dropout_prob hidden_dropout_prob drop_path_rate encoder_stride pooler_act
pooler_output_size out_features out_indices stage_names apply_layernorm reshape_hidden_states
image_mean image_std
""".split()
"""Keys of training and of outputs that are not the last states."""

VIT = Family(
    "ViTForImageClassification",
    "vit",
    encoder(1e-12),
    Layers({"block": block(attention(qkv_bias=Key("qkv_bias", True)), dense(), norm(1e-12))}),
    outer("vit")
    + LAYER_MODULES
    + modules("""
{layer}.layernorm_before   | mixer_norm | d
{layer}.layernorm_after    | mlp_norm   | d
{layer}.intermediate.dense | mlp/up     | f d -> d f
{layer}.output.dense       | mlp/down   | d f -> f d
"""),
    silent=DROPOUT,
    layer="vit.encoder.layer.{}",
    body="vit.",
    bare="ViTModel",
    unused=(r"vit\.pooler\..*",),
    schema=EncoderConfig,
)
GATED = {
    "kind": "gated",
    "hidden": SwiGLU(),
    "activation": "silu",
    "bias": True,
}


def _dinov2(name: str, body: str, patch: int, **more: Any) -> Family:
    """Return the family of DINOv2 whose classes' names begin with `name`. `patch`: size of a patch
    where the key is absent; `more`: further keys of the model."""
    return Family(
        f"{name}ForImageClassification",
        body,
        encoder(
            1e-6,
            patch=Key("patch_size", patch),
            mask_token=Key("use_mask_token", True),
            pool={"kind": WithHead("cls_mean", "cls")},
            **more,
        ),
        Layers(
            {
                "block": block(
                    attention(qkv_bias=Key("qkv_bias", True)),
                    Case(
                        "use_swiglu_ffn",
                        {False: dense(Times("mlp_ratio", "hidden_size", 4)), True: GATED},
                        False,
                    ),
                    norm(1e-6),
                    layer_scale=Key("layerscale_value", 1.0),
                )
            }
        ),
        outer(body)
        + LAYER_MODULES
        + SCALED
        + rows(f"""
{body}.embeddings.mask_token      | mask_token | 1 d -> d
{body}.embeddings.register_tokens | registers  | 1 r d -> r d
""")
        + without("mlp/gate", FC)
        + only(
            "mlp/gate: d f",
            modules("""
{layer}.mlp.weights_in  | mlp/gate: f, mlp/up: f | (+) d -> d +
{layer}.mlp.weights_out | mlp/down               | d f -> f d
"""),
        ),
        silent=[*DROPOUT, "hidden_act"],  # which gated MLPs of DINOv2 do not read
        layer=body + ".encoder.layer.{}",
        body=f"{body}.",
        bare=f"{name}Model",
        schema=EncoderConfig,
    )


DINOV2 = _dinov2("Dinov2", "dinov2", 14)
DINOV2_REGISTERS = _dinov2(
    "Dinov2WithRegisters", "dinov2_with_registers", 16, registers=Key("num_register_tokens", 4)
)
DINOV3 = Family(
    "DINOv3ViTModel",
    "dinov3_vit",
    encoder(
        1e-5,
        registers=Key("num_register_tokens", 0),
        mask_token=True,
        positions="rope2d",
    ),
    Layers(
        {
            "block": block(
                attention(
                    rope={
                        "theta": Key("rope_theta", 100.0),
                        "fraction": 1.0,
                        "scaling": None,
                        "interleaved": False,
                    },
                    qkv_bias=True,
                    key_bias=Key("key_bias", False),
                    out_bias=Key("proj_bias", True),
                ),
                Case(
                    "use_gated_mlp",
                    {False: dense(), True: {**dense(), "kind": "gated"}},
                    False,
                ),
                norm(1e-5),
                layer_scale=Key("layerscale_value", 1.0),
            )
        }
    ),
    rows("""
embeddings.cls_token       | cls        | 1 1 d -> d
embeddings.register_tokens | registers  | 1 r d -> r d
embeddings.mask_token      | mask_token | 1 1 d -> d
""")
    + modules("""
embeddings.patch_embeddings | patch       | d c p q -> p q c d
norm                        | norm        | d
{layer}.attention.q_proj    | mixer/query | (n h) d -> d n h
{layer}.attention.k_proj    | mixer/key   | (n h) d -> d n h
{layer}.attention.v_proj    | mixer/value | (n h) d -> d n h
{layer}.attention.o_proj    | mixer/out   | d (n h) -> n h d
""")
    + SCALED
    + parts.GATED,
    fixed={"query_bias": True, "value_bias": True, "mlp_bias": True},
    silent=[*DROPOUT, "pos_embed_jitter", "pos_embed_rescale", "pos_embed_shift"],
    layer="layer.{}",
    body="",
    bare="DINOv3ViTModel",
    schema=EncoderConfig,
)
MAP_IN = "vision_model.head.attention.in_proj"
MAP = {
    "kind": "map",
    "heads": Key("num_attention_heads"),
    "hidden": Key("intermediate_size"),
    "activation": Key("hidden_act", "gelu_pytorch_tanh", words=SILU),
    "norm": norm(1e-6),
}
SIGLIP = Family(
    "SiglipVisionModel",
    "siglip_vision_model",
    encoder(
        1e-6,
        cls=False,
        pool=Case("vision_use_head", {True: MAP, False: {"kind": "mean"}}, True),
    ),
    Layers({"block": block(attention(), dense(activation="gelu_pytorch_tanh"), norm(1e-6))}),
    rows("""
vision_model.embeddings.position_embedding.weight | positions  | t d
vision_model.head.probe                           | pool/probe | 1 1 d -> d
""")
    + rows(f"""
{MAP_IN}_weight | pool/query: n h, pool/key: n h, pool/value: n h                | (+) d -> d +
{MAP_IN}_bias   | pool/query_bias: n h, pool/key_bias: n h, pool/value_bias: n h | (+) -> +
""")
    + modules("""
vision_model.embeddings.patch_embedding | patch         | d c p q -> p q c d
vision_model.post_layernorm             | norm          | d
vision_model.head.attention.out_proj    | pool/out      | d (n h) -> n h d
vision_model.head.layernorm             | pool/norm     | d
vision_model.head.mlp.fc1               | pool/mlp/up   | f d -> d f
vision_model.head.mlp.fc2               | pool/mlp/down | d f -> f d
{layer}.layer_norm1                     | mixer_norm    | d
{layer}.layer_norm2                     | mlp_norm      | d
{layer}.self_attn.q_proj                | mixer/query   | (n h) d -> d n h
{layer}.self_attn.k_proj                | mixer/key     | (n h) d -> d n h
{layer}.self_attn.v_proj                | mixer/value   | (n h) d -> d n h
{layer}.self_attn.out_proj              | mixer/out     | d (n h) -> n h d
""")
    + FC,
    silent=DROPOUT,
    layer="vision_model.encoder.layers.{}",
    body="vision_model.",
    bare="SiglipVisionModel",
    schema=EncoderConfig,
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
)
