"""The prefix cache: pages, states, the radix tree over both. Knows no HTTP and no model names."""
