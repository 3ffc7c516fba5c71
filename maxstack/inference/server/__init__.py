"""OpenAI's API over HTTP for an engine."""
