"""Ranges of the sampling parameters, in configurations, tasks and requests; those of the command
line are in commands/generate.py, those of packages in package/text_signatures.py."""

from typing import Annotated

from pydantic import Field

Temperature = Annotated[float, Field(ge=0, le=1000)]
TopK = Annotated[int, Field(ge=0, le=1 << 30)]
TopP = Annotated[float, Field(gt=0, le=1)]
