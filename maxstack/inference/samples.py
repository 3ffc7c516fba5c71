"""Samples of text that a run writes at its evaluations."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import numpy as np

from maxstack import optim
from maxstack.data.tokenizers import open_prompt_tokenizer
from maxstack.errors import ConfigError
from maxstack.inference.engine import Engine
from maxstack.inference.engine_setup import make_limits
from maxstack.inference.layout import Layout
from maxstack.inference.multi_step import STEPS
from maxstack.inference.programs import inference_config
from maxstack.inference.request import Sampling
from maxstack.run import assemble
from maxstack.state import State

if TYPE_CHECKING:
    from maxstack.report.log import Log
    from maxstack.report.metrics import Writer
    from maxstack.run import Run


class Samples:
    """Answers the prompts of eval.samples with the weights of a step, on the mesh of the run."""

    def __init__(self, run: "Run", log: "Log", writer: "Writer"):
        """Raise ConfigError where the run has several processes."""
        settings = run.cfg.eval.samples
        assert settings
        if jax.process_count() > 1:
            raise ConfigError(
                "eval.samples: is for a run of one process; leave it out, and use `maxstack "
                "generate` on a checkpoint"
            )
        self._run = run
        self._log = log
        self._writer = writer
        self._settings = settings
        self._tokenizer = open_prompt_tokenizer(run.cfg.data.tokenizer)
        self._prompts = [
            self._tokenizer.encode(text.encode()).tolist() for text in settings.prompts
        ]
        length = max(map(len, self._prompts)) + settings.tokens
        self._engine = make_engine_beside(run, len(self._prompts), length)

    def __call__(self, step: int, state: State) -> None:
        """Write a text for each prompt to the log, metrics.jsonl and trackers. The seed is
        train.seed at every step, so that texts can be compared."""
        engine, settings = self._engine, self._settings
        engine.load(optim.eval_params(self._run.cfg.optimizer, state.opt, state.params))
        sampling = Sampling(
            max_tokens=settings.tokens,
            temperature=settings.temperature,
            seed=self._run.cfg.train.seed,
        )
        numbers = [
            # A choice of its own for each prompt, so that equal prompts get different texts.
            engine.add(prompt, dataclasses.replace(sampling, choice=i))
            for i, prompt in enumerate(self._prompts)
        ]
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        while engine.busy:
            for output in engine.step(many=STEPS):
                tokens[output.request] += [token.token for token in output.tokens]
        # Hold no weights between evaluations: the next step replaces them.
        engine.load(None)
        texts = [
            prompt + self._text(tokens[n])
            for prompt, n in zip(settings.prompts, numbers, strict=True)
        ]
        self._writer.write({"step": step, "samples": texts})
        for text in texts:
            self._log.say(f"sample at step {step}: {text}")

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(np.array(tokens, np.int32)).decode(errors="replace")


def make_engine_beside(run: "Run", requests: int, length: int) -> Engine:
    """Return an engine on the mesh of a run of one process, for `requests` at a time of at most
    `length` tokens; `load` gives it weights and takes them away."""
    # Rows of inference have no sequence to shard.
    rules = {**run.cfg.mesh.rules, "seq": (), "residual": ()}
    serve = run.cfg.serve.model_copy(
        # Weights differ at each evaluation, so no page could be found again.
        update={"max_requests": requests, "max_length": length, "prefix_cache": False}
    )
    mesh = run.cfg.mesh.model_copy(update={"rules": rules})
    cfg = inference_config(run.cfg.model_copy(update={"mesh": mesh, "serve": serve}))
    platform = run.mesh.devices.flat[0].platform
    limits, length = make_limits(cfg, Layout.of(cfg.decoder, cfg.serve, platform), length, None)
    return Engine(assemble(cfg, run.mesh, trains=False), None, limits, length)
