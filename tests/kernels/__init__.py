"""The fused kernels against the plain definitions, through Triton's interpreter."""
