"""Engines that are servers of their own: vLLM and SGLang."""
