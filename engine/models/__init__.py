"""What a decoder is (`spec`), how a family declares itself (`families`), how checkpoints become weights (`load`, `gguf`)."""

from engine.lean import modules_alone

modules_alone("gguf")  # before a module here imports one of it
