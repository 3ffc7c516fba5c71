"""The program that says which config.json files are read."""

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_files_are_accepted_told_or_refused_with_the_reason(tmp_path, monkeypatch, capsys):
    config = json.loads((ROOT / "tests/goldens/llama/config.json").read_text())
    changes = {"plain": {}, "deep/team": {"team": "a"}, "clip": {"clip_qkv": 8.0}}
    for name, more in changes.items():
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(config | more))
    script = str(ROOT / "scripts/check_configs.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path)])
    runpy.run_path(script, run_name="__main__")
    clip, team, plain, sums = capsys.readouterr().out.splitlines()
    assert clip.startswith("refused   clip.json  config.json: LlamaForCausalLM")
    assert "unknown keys: clip_qkv" in clip
    assert team.startswith("told      deep/team.json") and team.endswith("passed over: team")
    assert (plain, sums) == ("accepted  plain.json", "accepted 1, refused 1, told 1")
