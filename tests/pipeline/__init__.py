"""The pipeline: composing terms, evaluating them, and seeing which of them moves the model."""
