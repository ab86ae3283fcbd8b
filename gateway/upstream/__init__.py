"""Who answers: `engine.py` reaches our engine and every plain OpenAI server directly, `provider.py` the rest through litellm."""
