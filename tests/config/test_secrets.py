"""Secrets come into no file that maxstack writes: a configuration that holds one is refused."""

import pytest

from maxstack.config import load as load_schema
from maxstack.config import secrets
from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.schema.cluster import ClusterConfig

RANDOM = "q8Zr2Xw9Lm4Tn7Bv5Kc1Jh6Gf3Ds0PaYeU"
SHAPES = [
    f"hf_{RANDOM}",
    f"sk-proj-{RANDOM}",
    "AKIAIOSFODNN7EXAMPLE",
    f"ghp_{RANDOM}",
    f"glpat-{RANDOM}",
    f"xoxb-{RANDOM}",
    f"AIza{RANDOM}i",
    "https://me:hunter22@host/x.jsonl",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    f"token_hf_{RANDOM}",
    rf"hf\x5f{RANDOM}",
    f"https://host/x.jsonl?sv=1&sig={RANDOM}",
    f"https://{RANDOM}@host/x.jsonl",
    f"eyJ{RANDOM}.eyJ{RANDOM}.{RANDOM}",
]
NAMES = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "DB_PASSWORD",
    "MY_AUTH",
    "apiKey",
    "PGPASS",
    "HFTOKEN",
]
HARMLESS = {
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
    "GOOGLE_APPLICATION_CREDENTIALS": "/keys/account.json",
    "HF_TOKEN_PATH": "/keys/token",
    "AWS_ACCESS_KEY_ID": "id",
    "TOKENIZERS_PARALLELISM": "tokens",
    "MONKEY": "banana",
}


@pytest.mark.parametrize("value", SHAPES)
def test_a_value_that_looks_like_a_secret_is_refused_and_not_shown(value):
    with pytest.raises(ConfigError, match=r"^override: looks like a secret") as refusal:
        load("quickstart", [f'run.output_dir="x {value}"'])
    assert value not in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_that_is_a_secret_by_its_name_is_refused(name):
    for where, facts in (
        (f"env.{name}", {"env": {name: "swordfish"}}),
        ("slurm.setup.1", {"slurm": {"setup": ["module load x", f"export {name}='swordfish'"]}}),
    ):
        with pytest.raises(ConfigError, match=f"{where}: .*`secrets:`") as refusal:
            load_schema(ClusterConfig, {"topology": "h100:1x8", **facts})
        assert "swordfish" not in str(refusal.value)


def test_a_variable_that_only_sounds_like_a_secret_is_taken():
    setup = "export HF_TOKEN=$(cat ~/.token)", 'export WANDB_API_KEY="$MINE"'
    facts = {"topology": "h100:1x8", "env": HARMLESS, "slurm": {"setup": [*setup]}}
    cluster = load_schema(ClusterConfig, facts)
    assert cluster.env == HARMLESS and cluster.slurm.setup == setup


@pytest.mark.parametrize(
    "text",
    [
        "data/sk-wikipedia-20240101-clean.jsonl",
        "sk-learn-digits-and-more-of-them",
        "hf_internaltestingtinyrandommodel",
        "abfss://a-container-of-texts@account.dfs.core.windows.net/x.jsonl",
    ],
)
def test_a_text_that_only_looks_like_a_secret_is_taken(text):
    secrets.check(text, "here")
