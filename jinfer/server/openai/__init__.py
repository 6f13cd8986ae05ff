"""OpenAI's dialect: chat, text completions, embeddings, responses, files and batches."""
