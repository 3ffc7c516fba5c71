"""Rewards of completions, and environments of several turns, computed in worker processes."""
