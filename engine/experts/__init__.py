"""Expert banks, slots, splits and placement. Knows no HTTP and no model names."""
