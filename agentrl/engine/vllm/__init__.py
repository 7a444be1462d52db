"""vLLM as an engine: how it is started and probed (client side), and what we add inside its processes (`plugin`).

`plugin` is the only part that imports vllm or torch; it runs in vLLM's own interpreter, never in ours.
"""
