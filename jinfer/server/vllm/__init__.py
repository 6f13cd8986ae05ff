"""vLLM's dialect: tokens, classes, scores, adapters, steering; Cohere's and SageMaker's routes."""
