"""What a run needs of hardware that need not be here; `maxstack.plan(...)` is a function too."""

import maxstack

maxstack._call(__name__, maxstack._plan)
