"""The faults of scripts/drills.py, injected into real runs."""
