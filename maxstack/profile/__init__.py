"""Where the time of a training step goes, from a trace and the text of its program."""
