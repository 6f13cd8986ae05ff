"""llama.cpp's dialect: completion, infill, slots, resumable streams and model loading."""
