"""Compressed KV caches in vLLM: a plugin of public hooks, inert unless it is configured.

Settings travel in vLLM's `additional_config` under the key `pyramidkv`, so that every process has
the same. A request's prompt is compressed when it is complete: each group of layers frees the head
of its blocks, after the tokens to keep were moved out of them.
"""
