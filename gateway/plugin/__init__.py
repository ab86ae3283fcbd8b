"""The gateway's policies inside a LiteLLM proxy; `gateway.litellm_plugin` plugs them in. Nothing here imports litellm."""
