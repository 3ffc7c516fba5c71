"""Filters of documents, which `maxstack data prepare` applies before it tokenizes (data.steps)."""
