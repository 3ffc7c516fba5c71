"""Runs with weights in low precision, and with adapters, are saved and go on bit for bit."""

import shutil

import pytest
import tiers
import tiny

from maxstack import train

NF4 = {
    "mode": "ptq",
    "rules": [{"module_path": ".*/(mixer|mlp)/.*", "weight_qtype": "nf4", "tile_size": 8}],
}
INT8 = {"module_path": "blocks/.*"}
INT8 |= dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "int8")
CASES = {
    "int8 training": {"quantization": {"rules": [INT8]}},
    "bfloat16 weights": {"model": {"param_dtype": "bfloat16"}},
    "adapters with dropout on nf4": {
        "quantization": NF4,
        "lora": {"rank": 4, "dropout": 0.3, "dora": True},
    },
}


@pytest.mark.parametrize("case", tiers.of(CASES, slow=["int8 training"]))
def test_a_run_that_was_stopped_goes_on_bit_for_bit(case, tmp_path):
    shape = tiny.model(layers=1, pattern=["global"]) | CASES[case].get("model", {})
    cfg = tiny.config(
        **CASES[case] | {"model": shape},
        train={"steps": 6},
        checkpoint={"every": 3},
        eval={"every": 0},
        run={
            "output_dir": str(tmp_path),
            "tensorboard": False,
            "compilation_cache": str(tmp_path / "xla"),
        },
        faults={"watchdog": None},
    )
    path = str(tiny.write(tmp_path, cfg))
    for name, steps in (("whole", 6), ("half", 3), ("rest", 6)):
        if name == "rest":  # this process still holds the folder of the half
            shutil.copytree(tmp_path / "half", tmp_path / "rest")
        words = f"run.name={name}", f"train.steps={steps}", "optimizer.schedule=null"
        assert train.main([path, *words]) == 0
    whole, rest = (
        [row["loss"] for row in tiny.metrics(tmp_path / name) if "loss" in row]
        for name in ("whole", "rest")
    )
    assert whole == rest and len(whole) == 6
    for name in ("whole", "half"):
        said = (tmp_path / name / "log.txt").read_text()
        assert ("lora: the base is random" in said) == ("lora" in CASES[case])
