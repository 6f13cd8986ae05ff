"""The HTTP service: routes that clients of OpenAI, vLLM, llama.cpp and Inferflow know."""
