"""Hugging Face model folders: config.json and safetensors in, config.json and safetensors out."""
