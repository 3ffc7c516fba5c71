"""maxstack as a library: docs/PYTHON.md, and what it says."""

import inspect
import json
import operator
import os
import re
import signal
import subprocess
import sys

import documents
import pydantic
import pytest
import served

import maxstack
from maxstack.cli import main

PAGE = documents.ROOT / "docs" / "PYTHON.md"
SIGNATURES = {
    "LLM": "(model, *, overrides=(), chat_template=None, **serve)",
    "LLM.chat": "(self, messages, sampling_params=None, *, adapter=None, use_tqdm=True)",
    "LLM.generate": "(self, prompts, sampling_params=None, *, adapter=None, use_tqdm=True)",
    "LLM.stream": "(self, prompt, sampling_params=None, *, adapter=None)",
    "Callback.on_checkpoint": "(self, training, step)",
    "Callback.on_end": "(self, training)",
    "Callback.on_evaluation": "(self, training, row)",
    "Callback.on_start": "(self, training)",
    "Callback.on_step": "(self, training, row)",
    "Training.log": "(self, **values)",
    "Training.model": "(self)",
    "Training.save": "(self)",
    "Training.stop": "(self, reason)",
    "assemble": "(cfg, mesh=None, trains=True)",
    "dataset": "(cfg, *, process=0, processes=1, evaluation=False)",
    "evaluate": "(run, *overrides)",
    "export_folder": "(run, out, *, dtype=None, shard_size='5GB', architecture=None, weights=None)",
    "import_folder": "(folder, out, *overrides, dtype=None, allow_nonfinite=False)",
    "load": "(config, *overrides)",
    "model": "(name, *overrides)",
    "plan": "(config, topology='here', *, exact=False)",
    "train": "(config, *, callbacks=(), force_config=())",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.make(tmp_path_factory.mktemp("python") / "model", 256)


@pytest.fixture(scope="module")
def llm(folder):
    own = [served.FEW[0], served.FEW[2]]
    return maxstack.LLM(folder, overrides=own, rows=32, max_requests=4, max_length=64)


def ids(results):
    return [result.outputs[0].token_ids for result in results]


GREEDY = maxstack.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def test_the_page_does_what_it_shows(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    names = {}
    for block in documents.blocks(PAGE, "python"):
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[-5:]]
    assert losses == sorted(losses, reverse=True)
    listed = re.findall(r"`(\w+)[`(]", "".join(re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.M)))
    assert {*listed} == {*maxstack.__all__}


def test_importing_it_and_a_configuration_imports_no_jax():
    code = "import sys, maxstack; maxstack.load('quickstart'); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_module_of_the_same_name_is_the_function_too():
    from maxstack.load import load

    assert maxstack.load("quickstart", "train.steps=3").train.steps == 3
    assert maxstack.load.load is load
    with pytest.raises(maxstack.ConfigError, match="stepz"):
        maxstack.load("quickstart", "train.stepz=3")


def test_signatures_hold():
    made = {}
    for name in SIGNATURES:
        signature = inspect.signature(operator.attrgetter(name)(maxstack))
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        made[name] = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    assert made == SIGNATURES


def test_answers_are_those_of_the_command(llm, folder, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"prompt": "One, two"}\n')
    out = tmp_path / "out.jsonl"
    words = ["generate", str(folder), "--prompts", str(tmp_path / "prompts.jsonl")]
    words += ["--out", str(out), "--max-tokens", "12", "--temperature", "0.7", "--ignore-eos"]
    assert main([*words, *served.FEW, "serve.max_length=64"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    params = maxstack.SamplingParams(max_tokens=12, temperature=0.7, ignore_eos=True)
    results = llm.generate(["Hello", "One, two"], params)
    assert ids(results) == [row["tokens"] for row in rows]
    assert [result.outputs[0].text for result in results] == [row["text"] for row in rows]
    assert [result.outputs[0].finish_reason for result in results] == ["length", "length"]


def test_prompts_of_every_form_have_one_answer(llm):
    told = [{"role": "user", "content": "Hello"}]
    alone, *_ = llm.generate("Hello", GREEDY)
    tokens = alone.prompt_token_ids
    several = llm.generate(["Hello", tokens, told], GREEDY, use_tqdm=False)
    assert ids(several)[:2] == ids([alone]) * 2 == ids(llm.generate(tokens, GREEDY)) * 2
    assert ids(llm.chat(told, GREEDY)) == ids(several)[2:] == ids(llm.chat([told], GREEDY))
    assert [result.prompt for result in several] == ["Hello", None, told]
    assert "".join(llm.stream("Hello", GREEDY)) == alone.outputs[0].text


def test_seeds_and_several_answers(llm):
    params = maxstack.SamplingParams(n=2, max_tokens=12, temperature=5.0, ignore_eos=True, seed=3)
    first, second = llm.generate(["Hello", "Hello"], params)
    assert first.outputs == second.outputs
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    free = maxstack.SamplingParams(max_tokens=12, temperature=5.0, ignore_eos=True)
    made, again = (ids(llm.generate(["Hello", "Hello"], free)) for _ in range(2))
    assert made == again and made[0] != made[1]


def test_logprobs_and_what_ended_an_answer(llm):
    plain = llm.generate("Hello", GREEDY)[0].outputs[0]
    params = maxstack.SamplingParams(
        max_tokens=12, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=1,
        stop_token_ids=[plain.token_ids[4]],
    )  # fmt: skip
    result = llm.generate("Hello", params)[0]
    answer = result.outputs[0]
    place = plain.token_ids.index(plain.token_ids[4])
    assert answer.token_ids == plain.token_ids[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", plain.token_ids[4])
    chosen = [each[token] for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert all(each.rank == 1 for each in chosen)
    assert answer.cumulative_logprob == pytest.approx(sum(each.logprob for each in chosen))
    assert result.prompt_logprobs[0] is None
    assert [*map(set, result.prompt_logprobs[1:])] >= [
        {token} for token in result.prompt_token_ids[1:]
    ]
    letter = plain.text[1]
    stopped = llm.generate("Hello", maxstack.SamplingParams(
        max_tokens=12, temperature=0, ignore_eos=True, stop=letter
    ))[0].outputs[0]  # fmt: skip
    assert stopped.text == plain.text[: plain.text.index(letter)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", letter)


def test_the_engine_lives_on_after_an_interrupt(llm, monkeypatch):
    wanted = ids(llm.generate("Hello", GREEDY))
    layers = llm._served.engine.programs._layers

    class Interrupted:
        def __getattr__(self, name):
            return getattr(layers, name)

        def __call__(self, *given):
            layers(*given)  # which takes the cache
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._served.engine.programs, "_layers", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello", "others"], GREEDY)
    assert ids(llm.generate("Hello", GREEDY)) == wanted
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    stream.close()
    assert not llm._served.engine.busy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "wanted: a text, tokens, messages"),
        ([], "wanted: a text, tokens, messages"),
        (["fine", ""], "prompt 1: "),
        ([[5, 10**6]], "prompt 0: token 1000000 is outside the model's vocabulary"),
        ([[{"role": "user", "content": [{"type": "image_url"}]}]], "prompt 0: .*image_url"),
        ("long " * 99, "prompt 0: "),
    ],
)
def test_unusable_prompts_are_refused_by_their_place(llm, given, message):
    with pytest.raises(maxstack.DataError, match=message):
        llm.generate(given, GREEDY)


def test_unusable_settings_are_refused(llm, folder):
    with pytest.raises(pydantic.ValidationError, match="temperature"):
        maxstack.SamplingParams(temperature=-1)
    with pytest.raises(pydantic.ValidationError, match="temprature"):
        maxstack.SamplingParams(temprature=1)
    with pytest.raises(maxstack.ConfigError, match="max_reqests.*did you mean.*max_requests"):
        maxstack.LLM(folder, max_reqests=3)
    with pytest.raises(maxstack.ConfigError, match="n=2"):
        next(llm.stream("Hello", maxstack.SamplingParams(n=2)))


TINY = {
    "run": {"name": "tiny", "trackers": []},
    "model": {
        "vocab": 64,
        "embed": 16,
        "layers": 1,
        "dtype": "float32",
        "blocks": {
            "block": {
                "mixer": {"kind": "attention", "heads": 2, "head_dim": 8},
                "mlp": {"kind": "gated", "hidden": 32},
            }
        },
    },
    "data": {"sources": [{"kind": "synthetic", "vocab": 64, "holdout": 0.1}], "seq_len": 16},
    "train": {"steps": 8, "batch_size": 8},
    "eval": {"every": 4, "steps": 1},
    "checkpoint": {"every": 100, "keep": 3},
}


class Told(maxstack.Callback):
    """Keeps what it is told, and does something in one step."""

    def __init__(self, at=0, do=lambda training: None):
        self.at, self.do, self.events = at, do, []

    def on_start(self, training):
        self.events.append(("start", training.step))

    def on_step(self, training, row):
        self.events.append(("step", row["step"]))
        training.log(half=row["loss"] / 2, said=["words"])
        if row["step"] == self.at:
            self.do(training)

    def on_evaluation(self, training, row):
        self.events.append(("evaluation", training.step, "eval_loss" in row))

    def on_checkpoint(self, training, step):
        self.events.append(("checkpoint", step))

    def on_end(self, training):
        self.events.append(("end", training.step))


@pytest.fixture
def tiny(tmp_path):
    return maxstack.load(TINY, f"run.output_dir={tmp_path}")


def losses(trained):
    return {row["step"]: row["loss"] for row in trained.rows if "loss" in row}


def test_callbacks_hear_of_a_run_log_and_ask_for_a_checkpoint(tiny):
    told = Told(2, lambda training: training.save())
    trained = maxstack.train(tiny, callbacks=[told])
    assert trained.finished and trained.why == ""
    assert [each for each in told.events if each[0] != "step"] == [
        ("start", 0),
        ("evaluation", 0, True),
        ("checkpoint", 3),
        ("evaluation", 4, True),
        ("evaluation", 8, True),
        ("checkpoint", 8),
        ("end", 8),
    ]
    rows = trained.rows
    assert {row["step"]: row["half"] * 2 for row in rows if "half" in row} == losses(trained)
    assert all(row["said"] == ["words"] for row in rows if "said" in row)
    assert (trained.folder / "checkpoints" / "3").is_dir()
    figures = maxstack.evaluate(trained.folder)
    (last,) = (row for row in rows if "eval_loss" in row and row["step"] == 8)
    assert figures["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (lambda training: training.stop("enough"), "enough"),
        (lambda training: os.kill(os.getpid(), signal.SIGINT), "SIGINT"),
    ],
    ids=["stop", "interrupt"],
)
def test_a_run_that_is_stopped_goes_on_to_the_same_numbers(do, why, tiny, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    trained = maxstack.train(tiny, callbacks=[Told(2, do)])
    assert (trained.finished, trained.why) == (False, why)
    assert 3 <= max(losses(trained)) < 8 and signal.getsignal(signal.SIGINT) is before
    again = maxstack.train(tiny)
    whole = maxstack.train(maxstack.load(TINY, f"run.output_dir={tmp_path / 'whole'}"))
    assert again.finished and losses(again) == losses(whole) and len(losses(again)) == 8


def test_a_callback_that_fails_is_named_and_ends_the_run_or_is_dropped(tiny, tmp_path, capsys):
    with pytest.raises(ZeroDivisionError) as raised:
        maxstack.train(tiny, callbacks=[Told(2, lambda training: 1 / 0)])
    assert "raised by callback Told.on_step at step 2" in raised.value.__notes__[0]
    told = Told(2, lambda training: 1 / 0)
    words = f"run.output_dir={tmp_path / 'other'}", "train.callback_failure=drop"
    assert maxstack.train(maxstack.load(TINY, *words), callbacks=[told]).finished
    assert told.events[-1] == ("step", 2)
    assert "Told.on_step at step 2: dropped: ZeroDivisionError" in capsys.readouterr().out


def test_what_a_callback_cannot_do_says_so(tiny, tmp_path):
    def odd(training):
        with pytest.raises(maxstack.ConfigError, match="wanted a number or a list of texts"):
            training.log(shape=object())
        with pytest.raises(maxstack.ConfigError, match="is a figure of the run itself"):
            training.log(loss=3.0)
        with pytest.raises(maxstack.ConfigError, match="checkpoint.every=0"):
            training.save()

    cfg = maxstack.load(TINY, f"run.output_dir={tmp_path}", "checkpoint.every=0")
    assert maxstack.train(cfg, callbacks=[Told(2, odd)]).finished


def test_a_second_run_beside_the_first_is_refused(tiny, tmp_path):
    def another(training):
        with pytest.raises(maxstack.ConfigError, match="a run is training in this process already"):
            maxstack.train(maxstack.load(TINY, f"run.output_dir={tmp_path / 'other'}"))

    assert maxstack.train(tiny, callbacks=[Told(2, another)]).finished


def test_what_would_never_be_called_is_refused(tiny):
    class Odd(maxstack.Callback):
        def on_steps(self, training, row): ...

    with pytest.raises(
        maxstack.ConfigError, match="on_steps is never called; did you mean on_step"
    ):
        maxstack.train(tiny, callbacks=[Odd()])
    with pytest.raises(maxstack.ConfigError, match="is not made from a class derived from"):
        maxstack.train(tiny, callbacks=[Odd])
