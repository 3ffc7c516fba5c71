"""Generates the answers of a run's model to the prompts of tasks, with the inference engine."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import tqdm

from maxstack.errors import ConfigError
from maxstack.evals.scoring import Texts
from maxstack.inference.multi_step import STEPS
from maxstack.inference.request import Sampling
from maxstack.inference.samples import make_engine_beside
from maxstack.inference.text import TextStream
from maxstack.schema.tasks import GenerationConfig

if TYPE_CHECKING:
    from maxstack.run import Run


class Generator:
    """Generates answers by an inference engine on the mesh of the run."""

    def __init__(
        self, run: "Run", texts: Texts, requests: int, length: int, stop_tokens: Collection[int]
    ):
        """`length`: tokens of prompt and answer at most. ConfigError for a run of several
        processes."""
        # The engine lies on the devices of one process.
        if jax.process_count() > 1:
            raise ConfigError(
                "output_type=generate_until: is for a run of one process; leave such tasks out, "
                "and use `maxstack eval` on a checkpoint"
            )
        self._texts, self._length = texts, length
        self._stops = frozenset(stop_tokens)
        self._engine = make_engine_beside(run, requests, length)
        self._seed = run.cfg.train.seed

    def __call__(
        self,
        params: Any,
        prompts: Sequence[str],
        cfg: GenerationConfig,
        until: Sequence[str],
        progress: str = "",
    ) -> list[str]:
        """Return the answer to each prompt, up to the first of the strings `until`. A prompt that
        is too long loses its beginning. ConfigError where an answer leaves no room for a prompt."""
        room = self._length - cfg.max_gen_toks
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={cfg.max_gen_toks}: leaves no room for a prompt in the "
                f"{self._length} tokens of a request; give less, or more tokens a request"
            )
        engine, found = self._engine, [""] * len(prompts)
        special = self._texts.tokenizer.special.items()
        # A special token in `until` ends the answer by its id.
        stops = self._stops | {token for token, text in special if text in until}
        # Borrowed: the run keeps the weights.
        engine.load(params)
        running: dict[int, tuple[int, TextStream]] = {}
        for number, text in enumerate(prompts):
            # The end is kept, since that is where the question stands.
            tokens = self._texts.prompt(text)[-room:]
            sampling = Sampling.of(
                cfg,
                max_tokens=cfg.max_gen_toks,
                seed=self._seed,
                # Random numbers belong to the prompt's number, so answers do not depend on how many
                # run at once.
                choice=number,
                stop_tokens=stops,
                temperature=cfg.temperature if cfg.do_sample else 0.0,
            )
            stream = TextStream(self._texts.tokenizer, tokens, until)
            running[engine.add(tokens, sampling)] = number, stream
        with tqdm.tqdm(
            total=len(prompts), desc=progress, unit=" answers", disable=not progress or None
        ) as bar:
            while engine.busy:
                # Several steps in one program where the engine can, since nobody reads these
                # answers as they come.
                for output in engine.step(many=STEPS):
                    number, stream = running[output.request]
                    for token in output.tokens:
                        found[number] += stream.feed(token.token)
                    if output.finish:
                        found[number] += stream.flush()
                    elif stream.stopped is not None:
                        engine.abort(output.request)
                    if output.finish or stream.stopped is not None:
                        bar.update()
        # The engine must not keep the weights of a step that training leaves behind.
        engine.load(None)
        return found
