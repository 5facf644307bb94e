"""The models of a finished run behind an OpenAI-compatible endpoint on this machine."""
