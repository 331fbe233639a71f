"""Exports a checkpoint to files that others read: safetensors, Hugging Face, torch. Only torch's own need torch."""
