"""The Moorage engine: tokens, models, caches, experts. Knows nothing of agents' dialects; imports no litellm."""
