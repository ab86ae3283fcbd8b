"""The Moorage gateway: HTTP, dialects, policies, records. Imports no torch; of the engine it knows `engine.protocol` only."""
