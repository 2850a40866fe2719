"""Files of the embedded default model: chat and response templates."""
