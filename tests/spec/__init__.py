"""The runtime against its definitions, and the definitions against mathematics."""
