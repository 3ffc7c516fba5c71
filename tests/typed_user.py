"""A file as a user of maxstack writes it, for tests/test_types.py."""

# mypy: disallow-untyped-calls, disallow-any-generics, warn-unused-ignores, warn-return-any
# mypy: no-implicit-reexport
import maxstack

cfg: maxstack.Config = maxstack.load("quickstart", "train.steps=3")
run: maxstack.Run = maxstack.assemble(cfg)
llm = maxstack.LLM("runs/quickstart", max_requests=2)
texts: list[str] = [result.outputs[0].text for result in llm.generate(["a"])]
# An ignored error that is none is reported, so these hold too.
maxstack.SamplingParams(temperature="hot")  # type: ignore[arg-type]
maxstack.load(3)  # type: ignore[arg-type]
