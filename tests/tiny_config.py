"""A configuration small enough to read, for the tests of everything that takes one."""

import yaml

TINY = """\
model:
  vocab: 512
  embed: 64
  layers: 4
  dtype: float32
  blocks:
    full:
      mixer: {kind: attention, heads: 4, kv_heads: 2, head_dim: 16}
      mlp: {kind: gated, hidden: 128}
    local:
      like: full
      mixer: {window: 8}
  pattern: [local, full]
data:
  sources:
    - kind: synthetic
      vocab: 512
  seq_len: 32
train: {steps: 100, batch_size: 8}
"""


def of_one_kind():
    """The same with two layers of one kind, as a mapping."""
    cfg = yaml.safe_load(TINY)
    cfg["model"] |= {"layers": 2, "pattern": ["full"]}
    del cfg["model"]["blocks"]["local"]
    return cfg
