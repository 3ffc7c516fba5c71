"""Ranges of the sampling parameters, in configurations, tasks, requests and Python; those of the
command line are in commands/generate.py, those of packages in package/text_signatures.py."""

from typing import Annotated

from pydantic import BeforeValidator, Field

Temperature = Annotated[float, Field(ge=0, le=1000)]
TopK = Annotated[int, Field(ge=0, le=1 << 30)]
AnyTopK = Annotated[TopK, BeforeValidator(lambda given: 0 if given == -1 else given)]
"""With vLLM's -1 for all tokens."""
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
