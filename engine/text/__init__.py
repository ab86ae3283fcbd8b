"""Text and tokens: tokenizer, chat template, detokenizer, reasoning and tool-call parsers."""
