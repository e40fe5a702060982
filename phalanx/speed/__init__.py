"""What makes steps fast: layers in fp8, AdamW with 8-bit states, fused kernels."""
