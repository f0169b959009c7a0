"""Whether GSPO tolerates an engine's likelihoods as π_old (§5.4 of its paper): vLLM in bfloat16 and in float32."""
