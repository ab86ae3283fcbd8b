"""What agents speak on the wire, each translated to chat completions and back. `pipeline.py` lists them."""
