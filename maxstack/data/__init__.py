"""Documents to batches: sources, tokenizers, packing into lanes, the feed. Importing this package
imports nothing heavy."""
