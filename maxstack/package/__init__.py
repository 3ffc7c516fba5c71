"""Packages: a trained model as a folder of programs, weights and a manifest."""
