import json

import pytest

from maxstack import cli
from maxstack.errors import quoted, shortened

LONG = "x" * 200_000
ODD = "\x1b[31mred\x1b[0m\u202eback"


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """stderr of `config show run.yml`, the file holding some lines after a working
    preset."""
    monkeypatch.chdir(tmp_path)

    def show(text: str, *overrides: str) -> str:
        (tmp_path / "run.yml").write_text(text)
        assert cli.main(["config", "show", "run.yml", *overrides]) == 1
        return capsys.readouterr().err

    return show


@pytest.mark.parametrize(
    "lines",
    [
        f"train: {{steps: {LONG}}}",
        f"train: {{steps: {'1' * 100_000}}}",
        f"train: {{{LONG}: 1}}",
        f"train: {{steps: !{LONG} 1}}",
        f"train: {{steps: *{LONG}}}",
        f"optimizer: {{learning_rate: {LONG}}}",
        f"optimizer: {{chain: [{{kind: {LONG}}}]}}",
        f"optimizer: {{chain: [{', '.join([LONG[:1000]] * 100)}]}}",
        f"mesh: {LONG}",
        f"model: {{blocks: {{a: {{like: {LONG}}}}}}}",
        f"model: {{pattern: [{LONG}]}}",
        f"quantization: {{rules: [{{module_path: '({LONG}'}}]}}",
        f"mesh: {{rules: {{{LONG}: fsdp}}}}",
        f"run: {{name: '{LONG}/'}}",
        f"xla: {{flags: {{'-{LONG}': 1}}}}",
        *(
            f'{key}: {{{name}: "{json.dumps(ODD)[1:-1]}"}}'
            for key, name in (("run", "name"), ("train", "steps"), ("mesh", "preset"))
        ),
        f'train: {{"{json.dumps(ODD)[1:-1]}": 1}}',
    ],
)
def test_an_error_about_a_long_or_unprintable_value_stays_one_short_printable_paragraph(
    told, lines
):
    said = told(f"extends: synthetic\n{lines}")
    assert is_short(said) and "run.yml:2" in said


@pytest.mark.parametrize(
    "override",
    [
        f"train.steps={LONG}",
        f"train.{LONG}=1",
        LONG,
        f"train.steps.{LONG}=1",
        f"data.sources.{LONG}=1",
        f"train.{ODD}=1",
        f"mesh={ODD}",
    ],
)
def test_an_error_about_a_long_or_unprintable_override_stays_one_short_printable_paragraph(
    told, override
):
    assert is_short(told("extends: synthetic", override))


def is_short(said):
    """True for one paragraph that can be printed."""
    return len(said) < 1500 and said.replace("\n", "").isprintable() and said.count("\n") == 1


def test_what_is_extended_and_is_no_mapping_is_named_without_its_content(told, tmp_path):
    (tmp_path / "passwd.yml").write_text(
        "root:x:0:0:secret:/root:/bin/bash\ndaemon:x:1:1:secret:/usr/sbin:/usr/sbin/nologin\n"
    )
    said = told("extends: ./passwd.yml")
    assert (
        "passwd.yml:1: holds " in said
        and "a configuration is a mapping" in said
        and "secret" not in said
    )


@pytest.mark.parametrize(
    "content",
    [
        "root:$y$j9T$secret:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n",
        "secret: 1\n",
        "sec/ret: 1\nsec/ret: 2\n",
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        "extends: ./foreign.txt.yml",
        "extends: ./between.yml",
        "extends: synthetic\nmodel: ./foreign.txt.yml",
    ],
)
def test_a_foreign_file_is_refused_without_its_keys(told, tmp_path, content, text):
    (tmp_path / "foreign.txt.yml").write_text(content)
    (tmp_path / "between.yml").write_text("extends: ./foreign.txt.yml")
    assert (
        told(text) == "error: foreign.txt.yml: is not a maxstack configuration: its line 1 is not "
        "`section: ...`\n"
    )


def test_short_text_is_quoted_as_it_is():
    assert (
        quoted("a b") == "'a b'"
        and shortened("runs/ä b") == "runs/ä b"
        and quoted({"a": [1, None]}) == "{'a': [1, None]}"
    )
