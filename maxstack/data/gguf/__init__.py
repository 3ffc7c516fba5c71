"""GGUF, the format of llama.cpp, read as the files of a Hugging Face folder."""
