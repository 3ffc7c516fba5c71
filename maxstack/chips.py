"""Peak speeds of chips by jax's name for them, for MFU. Dense bfloat16 FLOP/s a device, from the makers' data sheets."""

PEAK_BF16 = {
    "NVIDIA A100-SXM4-40GB": 312e12,  # NVIDIA A100 data sheet
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,  # NVIDIA H100 data sheet, SXM, without sparsity
    "NVIDIA H200": 989.4e12,  # NVIDIA H200 data sheet, without sparsity
    "TPU v4": 275e12,  # Google Cloud TPU documentation, v4
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5": 459e12,  # v5p
    "TPU v6 lite": 918e12,  # v6e
}
