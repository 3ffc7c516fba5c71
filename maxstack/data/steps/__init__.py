"""Steps before tokens: what `maxstack data prepare` does to documents by data.steps."""
