"""What a decoder is (`spec`), how a family declares itself (`families`), how checkpoints become weights (`load`, `gguf`)."""
