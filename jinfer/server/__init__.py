"""HTTP server: the APIs of OpenAI, vLLM, llama.cpp and Inferflow (Starlette, uvicorn)."""
