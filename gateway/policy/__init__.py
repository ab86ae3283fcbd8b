"""Policies: pure functions from a chat body and its rules to decisions. They import no HTTP and no clock.

Each module has `decide(body, rules, ...) -> tuple[Decision, ...]` for anyone (the LiteLLM plugin uses it too) and
`stage(turn) -> Turn`, which is how it stands in `pipeline.py`.
"""
