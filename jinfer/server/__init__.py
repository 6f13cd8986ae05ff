"""HTTP server: the APIs of OpenAI, Anthropic, Ollama, llama.cpp, vLLM and Inferflow."""
