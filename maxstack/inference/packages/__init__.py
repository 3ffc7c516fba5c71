"""A server of packages: the Open Inference Protocol, with requests computed in batches."""
